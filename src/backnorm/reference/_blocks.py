"""The blocks in which the oracle works, and the few things that are done to one."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from backnorm._doubledouble import Exact, FloatArray
from backnorm.problem import channel_axis_of

__all__ = [
    "Blocks",
    "Cell",
    "column",
    "empty_exact",
    "inverse_deviation",
    "load",
    "row_sum",
    "store",
    "store_block",
    "zeros",
]

# Elements in one block: a score of float64 temporaries of this size stay in the second-level cache.
_BLOCK = 1 << 14
# Channels taken together at the least, so that channels-last data is read in whole cache lines.
_BLOCK_CHANNELS = 16
# Square roots of numbers below this lose their lower parts.
_SMALL = 2.0**-800

Cell = tuple[slice, slice, slice]


class Blocks:
    """A tensor seen as (outer, channel, inner), and the small blocks it is worked through in."""

    def __init__(self, shape: tuple[int, ...], data_format: str) -> None:
        axis = channel_axis_of(data_format) % len(shape)
        self.channels = shape[axis]
        self.outer = math.prod(shape[:axis])
        self.inner = math.prod(shape[axis + 1 :])
        self.count = self.outer * self.inner

    def view(self, array: np.ndarray) -> np.ndarray:
        """Return `array` in shape (outer, channel, inner)."""
        return array.reshape(self.outer, self.channels, self.inner)

    def channel_parts(self) -> Iterator[slice]:
        """Yield ranges of channels."""
        step = max(_BLOCK_CHANNELS, _BLOCK // max(self.count, 1))
        for start in range(0, self.channels, step):
            yield slice(start, min(start + step, self.channels))

    def cells(self, part: slice) -> Iterator[Cell]:
        """Yield blocks (outer, channel, inner) that together cover the channels of `part`."""
        room = max(1, _BLOCK // (part.stop - part.start))
        inner_step = max(1, min(self.inner, room))
        outer_step = max(1, room // inner_step)
        # Of an empty tensor there are none, however many rows of nothing it has.
        for outer in range(0, self.outer if self.inner else 0, outer_step):
            for inner in range(0, self.inner, inner_step):
                yield slice(outer, outer + outer_step), part, slice(inner, inner + inner_step)


def load(view: np.ndarray, cell: Cell) -> FloatArray:
    """Return a block as float64, shape (channels, elements)."""
    block = np.moveaxis(view[cell], 1, 0)
    return block.astype(np.float64, order="C").reshape(block.shape[0], -1)


def store_block(view: FloatArray, cell: Cell, value: FloatArray) -> None:
    """Write a block of shape (channels, elements) back into its place."""
    target = np.moveaxis(view[cell], 1, 0)
    target[...] = value.reshape(target.shape)


def column(values: np.ndarray, part: slice) -> FloatArray:
    return np.asarray(values[part], np.float64)[:, None]


def row_sum(value: Exact) -> Exact:
    return value.sum()[:, None]


def zeros(channels: int) -> Exact:
    return Exact.of(np.zeros((channels, 1)))


def empty_exact(shape: tuple[int, ...]) -> Exact:
    return Exact(np.empty(shape), np.empty(shape))


def store(target: Exact, part: slice, value: Exact) -> None:
    target.hi[part], target.lo[part] = value.hi, value.lo


def inverse_deviation(variance: Exact | FloatArray, epsilon: float) -> Exact:
    """Return ``1 / sqrt(variance + epsilon)``."""
    exact = variance if isinstance(variance, Exact) else Exact.of(variance)
    total = exact + epsilon
    # What a small number leaves behind its digits would be no number, unless that is made larger.
    scale = np.where(np.abs(total.hi) < _SMALL, 2.0**400, 1.0)
    root = (total * (scale * scale)).sqrt()
    return ((1.0 / root) * scale).settled(1.0 / np.sqrt(exact.hi + epsilon))
