"""From geometry to stages: kernels with records to fill in. No validation, no decisions."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16
from backnorm.kernels.cpu import channels
from backnorm.kernels.cpu.geometry import Columns, Segments
from backnorm.kernels.cpu.native import Stage
from backnorm.kernels.cpu.record import FROM_DATA, FROM_STATISTICS, MEANS_ALONE
from backnorm.layout import Extents

__all__ = ["Launch", "stored"]

# How the kernels see elements that Numba has no type for: see `vector`.
_STORAGE = {FLOAT16: np.dtype(np.uint16), BFLOAT16: np.dtype(np.int16)}


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
    dtype : numpy.dtype
        Element type of x, dy and the output.
    statistics_dtype : numpy.dtype
        Element type of statistics and parameters: x's, or a wider one.
    operation : {"forward", "backward", "frozen"}
        What the output is made of; "frozen": of dy alone.
    rectified, sided : bool
        Whether a rectifier follows, and whether a residual is added before it.
    epsilon : float
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
        dtype: np.dtype,
        statistics_dtype: np.dtype,
        operation: str,
        rectified: bool,
        sided: bool,
        epsilon: float,
        fused: bool,
        streaming: bool,
        threads: int,
    ) -> None:
        self.count = extents.outer * extents.inner
        self._channels = extents.channels
        self._step = channels.table_step(extents.channels)
        self._fused, self._threads = fused, threads
        numbers: tuple[int, ...]
        if isinstance(geometry, Segments):
            chunk = (geometry.rows, geometry.length, geometry.chunks, geometry.block)
            cut = (geometry.blocks, geometry.group, geometry.batch, geometry.share)
            numbers = (*extents, *chunk, *cut)
            batches = -(-extents.channels // (geometry.group * geometry.batch))
            self._summed = batches if fused else batches * geometry.blocks
            self._written = -(-self.count * extents.channels // geometry.share)
            partial = 0 if fused else 4 * geometry.blocks * self._step
        else:
            grid = (geometry.rows, geometry.width, geometry.rest, extents.inner, extents.channels)
            cut = (geometry.tile, geometry.depth, geometry.share, geometry.abreast)
            numbers = (*grid, geometry.repeats, geometry.block, geometry.blocks, *cut)
            self._summed = geometry.blocks * -(-geometry.width // geometry.tile)
            self._written = max(1, -(-geometry.rows // geometry.share))
            partial = 4 * geometry.blocks * channels.table_step(geometry.width)
        if self.count * extents.channels == 0:
            self._summed = self._written = 0
        self._table = channels.ROWS * self._step
        self._stage = functools.partial(
            Stage,
            type(geometry).__name__.lower(),
            (dtype.name, operation, rectified, sided),
            numbers,
            epsilon=epsilon,
            count=self.count,
            streaming=streaming,
            statistics=0 if statistics_dtype == dtype else 8 * statistics_dtype.itemsize,
        )
        self._forward, self._partial = operation == "forward", partial

    @functools.cached_property
    def complete(self) -> Stage:
        """Sum every channel, solve for its coefficients, write the output and the results."""
        items = self._summed if self._fused else self._summed + self._written
        source = FROM_DATA if self._forward else FROM_STATISTICS
        return self._of(self._summed, items, prepares=source, finishes=True, fused=self._fused)

    @functools.cached_property
    def sum_all(self) -> Stage:
        """Sum every channel from means alone, for `sums`."""
        return self._of(self._summed, self._summed, prepares=MEANS_ALONE)

    @functools.cached_property
    def reduce(self) -> Stage:
        """Sum every channel, for `sums`, and write the results."""
        return self._of(self._summed, self._summed, prepares=FROM_STATISTICS, finishes=True)

    @functools.cached_property
    def apply(self) -> Stage:
        """Write the output: forward, from statistics alone; backward, also from `sums`."""
        source = {"prepares": FROM_STATISTICS, "settles": not self._forward}
        return self._of(0, self._written, **source)

    def memory(self) -> np.ndarray:
        """Return memory for `reduce` and `apply` that `sums` can read and write."""
        return np.empty(self._table + self._partial)

    def sums(self, memory: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return views of the sums of every channel."""
        rows = memory[: self._table].reshape(channels.ROWS, self._step)[:, : self._channels]
        return rows[channels.FIRST], rows[channels.SECOND]

    def _of(self, summed: int, items: int, **slots: Any) -> Stage:
        participants = max(1, min(self._threads, items))
        space = self._table + (self._partial if summed else 0)
        return self._stage(space, participants, summed=summed, items=items, **slots)
