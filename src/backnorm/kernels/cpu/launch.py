"""From geometry to kernel calls on canonical arrays. No validation, no decisions."""

from __future__ import annotations

from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16
from backnorm.kernels.cpu import channels, columns, segments
from backnorm.kernels.cpu.geometry import Columns, Segments
from backnorm.kernels.cpu.threads import parallel
from backnorm.layout import Extents

__all__ = ["Work", "stored"]

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


class Work:
    """One problem under way: the canonical arrays and what is known of each channel.

    Parameters
    ----------
    x, dy, out : numpy.ndarray or None
        Stored arrays of `extents`; dy is None in a forward pass.
    extents : Extents
    geometry : Segments or Columns
    epsilon : float
        Used by a forward pass alone; in a backward pass it is in the scale already.
    streaming : bool
        Whether the output is written past the caches.
    threads : int

    Attributes
    ----------
    channel, coefficients : numpy.ndarray
        float64, (4, C): see `channels`.
    result : numpy.ndarray
        float64, (2, C): sum_dy and sum_dy_xmu, or mean and variance.
    """

    def __init__(
        self,
        x: np.ndarray | None,
        dy: np.ndarray | None,
        out: np.ndarray | None,
        *,
        extents: Extents,
        geometry: Segments | Columns,
        epsilon: float,
        streaming: bool,
        threads: int,
    ) -> None:
        self.x, self.dy, self.out = x, dy, out
        self.extents, self.geometry = extents, geometry
        self.epsilon, self.streaming, self.threads = epsilon, streaming, threads
        table = np.zeros((10, extents.channels))
        self.channel, self.coefficients, self.result = table[:4], table[4:8], table[8:]

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self.extents.outer * self.extents.inner

    def complete(self, *, fused: bool, needs_x: bool = True) -> None:
        """Sum every channel, solve for its coefficients, and write the output."""
        # No element: the sums are zero, as they were made.
        if self.count * self.extents.channels == 0:
            return
        if fused:
            self._fused()
        elif isinstance(self.geometry, Columns):
            self._both(self.geometry, needs_x)
        else:
            self.reduce()
            self.apply(needs_x=needs_x)

    def reduce(self) -> None:
        """Sum every channel and solve for its coefficients."""
        geometry, extents = self.geometry, self.extents
        # One channel's columns in the partial sums, and how often they come.
        inner, repeats = 1, 1
        arguments: tuple[Any, ...]
        if isinstance(geometry, Segments):
            partial = np.empty((geometry.blocks, 4, extents.channels))
            arguments = (extents, _chunk(geometry), geometry.group, self.channel, partial)
            items = geometry.blocks * -(-extents.channels // geometry.group)
            kernel = segments.reduce
        else:
            partial = np.empty((geometry.blocks, 4, geometry.width))
            arguments = (self._grid(geometry), _cut(geometry), self.channel, partial)
            items = geometry.blocks * -(-geometry.width // geometry.tile)
            kernel = columns.reduce
            inner, repeats = extents.inner, geometry.repeats
        parallel(kernel, (self.x, self.dy, *arguments), items, self.threads)
        channels.combine(
            self.dy,
            partial,
            inner,
            repeats,
            self.count,
            self.channel,
            self.epsilon,
            self.coefficients,
            self.result,
        )

    def apply(self, *, needs_x: bool = True) -> None:
        """Write the output from the coefficients."""
        geometry = self.geometry
        arguments: tuple[Any, ...]
        if isinstance(geometry, Segments):
            arguments = (self.extents, geometry.share)
            items = -(-self.count * self.extents.channels // geometry.share)
            kernel = segments.apply
        else:
            arguments = (self._grid(geometry), _cut(geometry))
            items = _shares(geometry)
            kernel = columns.apply
        x = self.x if needs_x else None
        arguments = (x, self.dy, self.out, *arguments, self.coefficients, self.streaming)
        parallel(kernel, arguments, items, self.threads)

    def _fused(self) -> None:
        geometry = self.geometry
        assert isinstance(geometry, Segments)
        arguments = (
            self.x,
            self.dy,
            self.out,
            self.extents,
            _chunk(geometry),
            geometry.group,
            self.channel,
            self.coefficients,
            self.result,
            self.epsilon,
            self.streaming,
        )
        items = -(-self.extents.channels // geometry.group)
        parallel(segments.fused, arguments, items, self.threads)

    def _both(self, geometry: Columns, needs_x: bool) -> None:
        partial = np.empty((geometry.blocks, 4, geometry.width))
        arguments = (
            self.x,
            self.dy,
            self.x if needs_x else None,
            self.out,
            self._grid(geometry),
            _cut(geometry),
            geometry.repeats,
            self.channel,
            partial,
            self.coefficients,
            self.result,
            self.epsilon,
            self.streaming,
        )
        items = geometry.blocks * -(-geometry.width // geometry.tile) + _shares(geometry)
        parallel(columns.both, arguments, items, self.threads)

    def _grid(self, geometry: Columns) -> tuple[int, int, int, int, int]:
        extents = self.extents
        return geometry.rows, geometry.width, geometry.rest, extents.inner, extents.channels


def _chunk(geometry: Segments) -> tuple[int, int, int, int]:
    return geometry.rows, geometry.length, geometry.chunks, geometry.block


def _cut(geometry: Columns) -> tuple[int, int, int, int, int]:
    return geometry.block, geometry.tile, geometry.depth, geometry.share, geometry.abreast


def _shares(geometry: Columns) -> int:
    return max(1, -(-geometry.rows // geometry.share))
