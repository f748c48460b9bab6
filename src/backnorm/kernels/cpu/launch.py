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
    flat = array.reshape(-1)
    storage = _STORAGE.get(flat.dtype)
    if storage is not None:
        flat = flat.view(storage)
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
        self.channel = np.zeros((4, extents.channels))
        self.coefficients = np.zeros((4, extents.channels))
        self.result = np.zeros((2, extents.channels))

    @property
    def count(self) -> int:
        """Elements of a channel."""
        return self.extents.outer * self.extents.inner

    def fused(self) -> None:
        """Sum, solve and write, channel by channel."""
        geometry = self.geometry
        common = (
            self.channel,
            self.coefficients,
            self.result,
            self.epsilon,
            self.streaming,
        )
        arrays = (self.x, self.dy, self.out)
        arguments: tuple[Any, ...]
        if isinstance(geometry, Segments):
            arguments = (*arrays, self.extents, _chunk(geometry), *common)
            parallel(segments.fused, arguments, self.extents.channels, self.threads)
        else:
            arguments = (
                *arrays,
                self._grid(geometry),
                geometry.block,
                geometry.fused_tile,
                *common,
            )
            items = -(-geometry.width // geometry.fused_tile)
            parallel(columns.fused, arguments, items, self.threads)

    def reduce(self) -> None:
        """Sum every channel and solve for its coefficients."""
        geometry = self.geometry
        # Dimensions of the combination: one channel's columns, and how often they come.
        inner, repeats = 1, 1
        arguments: tuple[Any, ...]
        if isinstance(geometry, Segments):
            partial = np.empty((geometry.blocks, 4, self.extents.channels))
            arguments = (self.x, self.dy, self.extents, _chunk(geometry), self.channel, partial)
            items = geometry.blocks * self.extents.channels
            parallel(segments.reduce, arguments, items, self.threads)
        else:
            partial = np.empty((geometry.blocks, 4, geometry.width))
            grid = self._grid(geometry)
            arguments = (
                self.x,
                self.dy,
                grid,
                geometry.block,
                geometry.tile,
                self.channel,
                partial,
            )
            items = geometry.blocks * -(-geometry.width // geometry.tile)
            parallel(columns.reduce, arguments, items, self.threads)
            inner, repeats = self.extents.inner, geometry.repeats
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
        x = self.x if needs_x else None
        arguments: tuple[Any, ...]
        if isinstance(geometry, Segments):
            arguments = (x, self.dy, self.out, self.extents, geometry.share)
            items = -(-self.count * self.extents.channels // geometry.share)
            kernel = segments.apply
        else:
            grid = self._grid(geometry)
            arguments = (x, self.dy, self.out, grid, geometry.share, geometry.width)
            items = -(-geometry.rows // geometry.share) + (geometry.rest > 0)
            kernel = columns.apply
        parallel(kernel, (*arguments, self.coefficients, self.streaming), items, self.threads)

    def _grid(self, geometry: Columns) -> tuple[int, int, int, int, int]:
        extents = self.extents
        return geometry.rows, geometry.width, geometry.rest, extents.inner, extents.channels


def _chunk(geometry: Segments) -> tuple[int, int, int, int]:
    return geometry.rows, geometry.length, geometry.chunks, geometry.block
