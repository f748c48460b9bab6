"""From geometry to kernel calls on canonical arrays. No validation, no decisions."""

from __future__ import annotations

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16
from backnorm.kernels.cpu import channels, columns, segments
from backnorm.kernels.cpu.geometry import Columns, Segments
from backnorm.kernels.cpu.threads import parallel
from backnorm.layout import Extents

__all__ = ["Launch", "stored"]

# How the kernels see elements that Numba has no type for: see `vector`.
_STORAGE = {FLOAT16: np.dtype(np.uint16), BFLOAT16: np.dtype(np.int16)}

_NOTHING = np.empty(0)


class _Writable:
    """Array interface of a read-only array, with the flag taken off."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def stored(array: np.ndarray) -> np.ndarray:
    """Return a dense array as the kernels see it: one-dimensional, of a storage type.

    Numba compiles a function anew for read-only arrays. Kernels never write to their inputs, so
    for them the flag is taken off.
    """
    flat = array if array.ndim == 1 else array.reshape(-1)
    if flat.dtype.itemsize == 2:
        flat = flat.view(_STORAGE[flat.dtype])
    return flat if flat.flags.writeable else np.asarray(_Writable(flat))


class Launch:
    """How a problem's kernels are called, whatever the arrays.

    Parameters
    ----------
    extents : Extents
    geometry : Segments or Columns
    epsilon : float
        Used by a forward pass alone; in a backward pass it is in the scale already.
    fused : bool
        Whether a channel is written while still in the cache.
    streaming : bool
        Whether the output is written past the caches.
    threads : int
    """

    def __init__(
        self,
        extents: Extents,
        geometry: Segments | Columns,
        *,
        epsilon: float,
        fused: bool,
        streaming: bool,
        threads: int,
    ) -> None:
        self.extents = extents
        self.count = extents.outer * extents.inner
        self._channels = extents.channels
        self._empty = self.count * extents.channels == 0
        self._step = channels.table_step(extents.channels)
        self._epsilon, self._streaming, self._threads = epsilon, streaming, threads
        self._fused = fused
        self._segments = isinstance(geometry, Segments)
        self._kernel = segments.run if self._segments else columns.run
        values: tuple[int, ...]
        if isinstance(geometry, Segments):
            chunk = (geometry.rows, geometry.length, geometry.chunks, geometry.block)
            cut = (geometry.blocks, geometry.group, geometry.batch, geometry.share)
            values = (*extents, *chunk, *cut)
            batches = -(-extents.channels // (geometry.group * geometry.batch))
            self._summed = batches if fused else batches * geometry.blocks
            self._written = -(-self.count * extents.channels // geometry.share)
            self._partial = 0 if fused else 4 * geometry.blocks * self._step
        else:
            grid = (geometry.rows, geometry.width, geometry.rest, extents.inner, extents.channels)
            cut = (geometry.tile, geometry.depth, geometry.share, geometry.abreast)
            values = (*grid, geometry.repeats, geometry.block, geometry.blocks, *cut)
            self._summed = geometry.blocks * -(-geometry.width // geometry.tile)
            self._written = max(1, -(-geometry.rows // geometry.share))
            self._partial = 4 * geometry.blocks * channels.table_step(geometry.width)
        self._geometry = np.array(values, np.int64)

    def table(self) -> np.ndarray:
        """Return a new table of what is known of every channel (see `channels`)."""
        # The sums of no elements are zero. Otherwise nothing is read that was not written.
        return (np.zeros if self._empty else np.empty)(channels.ROWS * self._step)

    def results(self, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the two results of every channel in a table."""
        rows = table.reshape(channels.ROWS, self._step)[:, : self._channels]
        return rows[channels.FIRST], rows[channels.SECOND]

    def pivots(
        self,
        x: np.ndarray,
        gamma: np.ndarray | None,
        beta: np.ndarray | None,
        table: np.ndarray,
    ) -> None:
        """Fill a table for a forward pass."""
        extents = self.extents
        channels.prepare_forward(x, *extents, gamma, beta, table)

    def settle(self, total: int, table: np.ndarray) -> None:
        """Fill the coefficients of a table from its results, sums over `total` elements each."""
        channels.settle(total, self._channels, table)

    def complete(
        self,
        x: np.ndarray,
        dy: np.ndarray | None,
        out: np.ndarray,
        table: np.ndarray,
        *,
        needs_x: bool = True,
    ) -> None:
        """Sum every channel, solve for its coefficients, and write the output.

        All arrays are stored ones of `extents`; dy is None in a forward pass. Without `needs_x`
        the output does not depend on x.
        """
        items = self._summed if self._fused else self._summed + self._written
        self._run(x, dy, x if needs_x else None, out, table, self._summed, items)

    def reduce(self, x: np.ndarray, dy: np.ndarray | None, table: np.ndarray) -> None:
        """Sum every channel and solve for its coefficients."""
        self._run(x, dy, x, x, table, self._summed, self._summed)

    def apply(
        self,
        x: np.ndarray,
        dy: np.ndarray | None,
        out: np.ndarray,
        table: np.ndarray,
        *,
        needs_x: bool = True,
    ) -> None:
        """Write the output from the coefficients."""
        self._run(x, dy, x if needs_x else None, out, table, 0, self._written)

    def _run(
        self,
        x: np.ndarray,
        dy: np.ndarray | None,
        seen: np.ndarray | None,
        out: np.ndarray,
        table: np.ndarray,
        summed: int,
        items: int,
    ) -> None:
        # The table was made for this.
        if self._empty:
            return
        partial = np.empty(self._partial) if summed and self._partial else _NOTHING
        how: tuple[float, ...] = (self._epsilon, self._streaming)
        if self._segments:
            how = (*how, self._fused and summed > 0)
        arguments = (x, dy, seen, out, self._geometry, table, partial, *how)
        parallel(self._kernel, arguments, summed, items, self._threads)
