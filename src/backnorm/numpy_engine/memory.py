"""Blocks of arrays in memory, as float64.

A block has some channels, and for each of them the same span of elements. The elements of a
channel are counted in their order in memory. Spans have a fixed length, so the blocks of a channel,
and with them the bits of its sums, do not depend on the position of the channel axis.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from backnorm.dtypes import FLOAT64, rounded
from backnorm.layout import Extents

# The elements of a span, and the elements of a block. About four float64 blocks are in use at a
# time, which take 2 MiB. With longer spans, a block has fewer channels, and reading an array in NXC
# takes up to 1.7 times as long (spans of 4096 elements, Intel Xeon).
_SPAN, _BLOCK = 1 << 10, 1 << 16


class Block(NamedTuple):
    """A part of an array: `channels` is a slice, and `start` to `stop` - 1 are the elements."""

    channels: slice
    start: int
    stop: int


def block_shape(extents: Extents) -> tuple[int, int]:
    """Return how many channels, and how many elements of each channel, a block has at most."""
    span = max(1, min(extents.outer * extents.inner, _SPAN))
    return max(1, min(extents.channels, _BLOCK // span)), span


def groups(extents: Extents) -> Iterator[tuple[slice, list[Block]]]:
    """Yield slices that together have all channels, each with the blocks of its channels."""
    count, (together, span) = extents.outer * extents.inner, block_shape(extents)
    for first in range(0, extents.channels, together):
        channels = slice(first, min(first + together, extents.channels))
        starts = range(0, count, span)
        yield channels, [Block(channels, at, min(at + span, count)) for at in starts]


def array_at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return the C-contiguous array at an address, without a copy."""
    size = int(np.prod(shape)) * dtype.itemsize
    if not size:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, memoryview((ctypes.c_char * size).from_address(address)))


class Elements:
    """The elements of an array in memory, which are read and written block by block.

    Parameters
    ----------
    address : int
    extents : Extents
    dtype : numpy.dtype
    """

    def __init__(self, address: int, extents: Extents, dtype: np.dtype) -> None:
        self._view, self._inner = array_at(address, tuple(extents), dtype), extents.inner

    def load(self, block: Block) -> np.ndarray:
        """Return a copy of a block as float64, of shape (channels, elements)."""
        channels = block.channels.stop - block.channels.start
        values = np.empty((channels, block.stop - block.start), FLOAT64)
        for part, columns, shape in self._parts(block):
            values[:, columns].reshape(shape)[...] = part.transpose(1, 0, 2)
        return values

    def store(self, block: Block, values: np.ndarray) -> None:
        """Write float64 values to a block, rounded once."""
        values = rounded(values, self._view.dtype)
        for part, columns, shape in self._parts(block):
            part[...] = values[:, columns].reshape(shape).transpose(1, 0, 2)

    def flat(self) -> np.ndarray:
        """Return the elements in their order in memory, without a copy."""
        return self._view.reshape(-1)

    def _parts(self, block: Block) -> Iterator[tuple[Any, slice, tuple[int, int, int]]]:
        """Yield the parts of a block that are boxes of (outer, channels, inner): a view of the box,
        the columns that it has in the block, and the shape of these columns.
        """
        channels = block.channels.stop - block.channels.start
        for rows, inner, columns in _boxes(block, self._inner):
            view = self._view[rows, block.channels, inner]
            yield view, columns, (channels, view.shape[0], view.shape[2])


class Mask:
    """The mask of a ReLU: bit i % 8 of byte i // 8 is that of the element i in memory."""

    def __init__(self, address: int, extents: Extents) -> None:
        size = extents.outer * extents.channels * extents.inner
        self._bytes = array_at(address, (-(-size // 8),), np.dtype(np.uint8))
        self._extents = extents

    def load(self, block: Block) -> np.ndarray:
        """Return the bits of a block as a bool array of shape (channels, elements)."""
        _, channels, inner = self._extents
        element = np.arange(block.start, block.stop)
        channel = np.arange(block.channels.start, block.channels.stop)[:, None]
        bit = (element // inner * channels + channel) * inner + element % inner
        bits: np.ndarray = (self._bytes[bit >> 3] >> (bit & 7)) & 1 != 0
        return bits

    def store(self, y: np.ndarray, ceiling: float) -> None:
        """Write the bits of y, the elements in memory order: whether 0 < y < ceiling.

        If the ceiling is infinite, an infinite y counts as below it.
        """
        for start in range(0, y.size, _BLOCK):
            values = y[start : start + _BLOCK].astype(FLOAT64)
            below = values < ceiling if np.isfinite(ceiling) else values == values
            bits = np.packbits((values > 0) & below, bitorder="little")
            self._bytes[start >> 3 :][: bits.size] = bits


def _boxes(block: Block, inner: int) -> Iterator[tuple[slice, slice, slice]]:
    """Yield the rows, the elements of these rows, and the columns of each box of a block."""
    start = block.start
    while start < block.stop:
        row, at = divmod(start, inner)
        left = block.stop - start
        if at or left < inner:
            rows, length = 1, min(inner - at, left)
        else:
            rows, length = left // inner, inner
        end = start + rows * length
        columns = slice(start - block.start, end - block.start)
        yield slice(row, row + rows), slice(at, at + length), columns
        start = end
