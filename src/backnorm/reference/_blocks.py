"""Blocks of arrays. The oracle processes one block at a time, so its temporary memory does not grow
with the data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from backnorm.problem import channel_axis_of
from backnorm.reference._doubledouble import Exact
from backnorm.reference._terms import Term

# The number of elements of a block. Twenty float64 temporaries of this size take 2.5 MiB, and so
# stay in a cache.
_BLOCK = 1 << 14
# The least number of channels in a block. In channels-last data, 16 neighbouring float32 channels
# fill a cache line (64 bytes), so that a block reads whole lines.
_BLOCK_CHANNELS = 16

_Cell = tuple[slice, slice, slice]
_Record = TypeVar("_Record")


class Blocks:
    """A tensor viewed as (outer, channel, inner), which is processed in small blocks."""

    def __init__(self, shape: tuple[int, ...], data_format: str) -> None:
        axis = channel_axis_of(data_format) % len(shape)
        self.shape, self.channels = shape, shape[axis]
        self.outer = math.prod(shape[:axis])
        self.inner = math.prod(shape[axis + 1 :])
        #: Elements per channel, or 1 if there are none, because this number is a divisor.
        self.count = float(max(self.outer * self.inner, 1))

    def view(self, array: np.ndarray) -> np.ndarray:
        """Return `array` in shape (outer, channel, inner)."""
        return array.reshape(self.outer, self.channels, self.inner)

    def parts(self) -> Iterator[Part]:
        """Divide the channels into ranges, and yield a `Part` for each range."""
        step = max(_BLOCK_CHANNELS, _BLOCK // max(self.outer * self.inner, 1))
        for start in range(0, self.channels, step):
            yield Part(self, slice(start, min(start + step, self.channels)))


class Part:
    """A range of channels."""

    def __init__(self, blocks: Blocks, channels: slice) -> None:
        self.blocks, self.channels = blocks, channels
        #: The index that selects this range of channels in an array of shape (1, channels, 1).
        self.cell: _Cell = slice(None), channels, slice(None)

    def channel(self, values: np.ndarray | None, absent: float = 0.0) -> Term:
        """Return this range of `values`, in shape (channels, 1). If `values` is None, every element
        of the result is the number `absent`.
        """
        if values is None:
            return Term.of(np.full((self.channels.stop - self.channels.start, 1), absent))
        return Term.of(np.asarray(values[self.channels], np.float64)[:, None])

    def cells(self) -> Iterator[_Cell]:
        """Yield blocks that together cover all elements of the channels."""
        outer, inner = self.blocks.outer, self.blocks.inner
        room = max(1, _BLOCK // (self.channels.stop - self.channels.start))
        inner_step = max(1, min(inner, room))
        outer_step = max(1, room // inner_step)
        # An empty tensor has no blocks, even if it has many empty rows.
        for i in range(0, outer if inner else 0, outer_step):
            for j in range(0, inner, inner_step):
                yield slice(i, i + outer_step), self.channels, slice(j, j + inner_step)

    def load(self, view: np.ndarray, cell: _Cell) -> Term:
        """Return one block of an array as a `Term`, whose arrays have the shape (channels,
        elements).
        """
        block = np.moveaxis(view[cell], 1, 0)
        return Term.of(block.astype(np.float64, order="C").reshape(block.shape[0], -1))


class Weights:
    """The weights of elements in the statistics; without an array, every element counts once."""

    def __init__(self, blocks: Blocks, x: np.ndarray, weights: np.ndarray | None) -> None:
        self._view = None if weights is None else blocks.view(np.broadcast_to(weights, x.shape))
        #: x with 0 in place of uncounted elements, which may be NaN.
        self.counted = blocks.view(x if weights is None else np.where(weights, x, x.dtype.type(0)))

    def times(self, term: Term, part: Part, cell: _Cell) -> Term:
        """Return a block of elements, each multiplied by its weight."""
        return term if self._view is None else part.load(self._view, cell) * term

    def total(self, part: Part) -> float | Term:
        """Return the sum of the weights of each channel."""
        view = self._view
        if view is None:
            return part.blocks.count
        return sums(part, 1, ((part.load(view, cell),) for cell in part.cells()))[0]


def sums(part: Part, number: int, terms: Iterable[Sequence[Term]]) -> list[Term]:
    """Return `number` sums of each channel.

    `terms` yields, for each block, a sequence with one term for each sum.
    """
    totals = [part.channel(None)] * number
    for block in terms:
        totals = [total + term.sum() for total, term in zip(totals, block, strict=True)]
    return [total.settled() for total in totals]


class Outputs:
    """Results that are written block by block.

    Parameters
    ----------
    blocks : Blocks
    elements, channels : tuple of str
        Names of the elementwise results, and of the per-channel results.
    """

    def __init__(
        self, blocks: Blocks, elements: tuple[str, ...], channels: tuple[str, ...] = ()
    ) -> None:
        shape, per_channel = (blocks.outer, blocks.channels, blocks.inner), (1, blocks.channels, 1)
        self._shapes = dict.fromkeys(elements, blocks.shape)
        self._shapes |= dict.fromkeys(channels, (blocks.channels,))
        sizes = dict.fromkeys(elements, shape) | dict.fromkeys(channels, per_channel)
        self._arrays = {name: [np.empty(size) for _ in range(3)] for name, size in sizes.items()}

    def write(self, name: str, cell: _Cell, value: Term) -> None:
        """Write a block of a result."""
        value = value.settled()
        forms = value.exact.hi, value.exact.lo, value.size
        for array, form in zip(self._arrays[name], forms, strict=True):
            target = np.moveaxis(array[cell], 1, 0)
            target[...] = form.reshape(target.shape)

    def as_record(self, record: type[_Record]) -> _Record:
        """Return a record with two fields for each result: its exact value, and its T.

        T (`Term.size`) is the sum of the magnitudes of the terms of which the result is the sum.
        """
        fields: dict[str, Any] = {}
        for name, array in self._arrays.items():
            hi, lo, fields[f"{name}_terms"] = (part.reshape(self._shapes[name]) for part in array)
            fields[name] = Exact(hi, lo)
        return record(**fields)
