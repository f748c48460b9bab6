"""A call of a kernel: a record is filled in, and one native function does the rest.

The function takes the address of a record, whose fields `record` describes, and the number of a
participant. Whoever calls it

1. fills in the addresses;
2. lets any number of others, up to `participants` - 1, call it with 1, 2, ... at any time
   from then on (they wait until the table is filled, and do nothing if they come too late, so the
   record must live until the last of them has returned), and calls it with 0;
3. if the result is 0, waits until `done` equals `items`, and calls it with `record.JOINED`.

The result is then 1, or -1 - c where channel c has a variance + epsilon that is not positive.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from backnorm.cpu import library
from backnorm.cpu.addresses import address_of
from backnorm.cpu.kinds import Kind
from backnorm.cpu.record import ADDRESSES, JOINED, SLOTS, head_of, template
from backnorm.cpu.scratch import FIRST, ROWS, SECOND, table_step
from backnorm.cpu.threads import bell, summon, wait

__all__ = ["Stage"]

# Addresses are filled in for every call. They lie at the beginning.
_fill = struct.Struct(f"{len(ADDRESSES)}q").pack_into
_MOMENTUM, _COUNT = SLOTS["momentum"], SLOTS["count"]

_BELL = SLOTS["bell"]

# Bytes of a record that is kept for the next call of one thread.
_KEPT = 1 << 15


class _Record:
    """Memory of a record, which begins at a cache line."""

    __slots__ = ("address", "cells")

    def __init__(self, cells: np.ndarray, size: int) -> None:
        memory = _memory(size + 64)
        start = -address_of(memory) % 64 // 8
        self.cells = memory[start : start + size // 8]
        self.cells[: cells.size] = cells
        self.address = address_of(self.cells)


def _memory(size: int) -> Any:
    """Return so many bytes of new memory, as cells."""
    return np.empty(size // 8, np.int64)


class Stage:
    """A kernel, and its record but for the addresses.

    Parameters
    ----------
    kind : Kind
    numbers : mapping of str to int
        The geometry's fields.
    channels : int
        Places of the table of channels.
    partial : int
        Float64 elements of the partial sums.
    own : int
        Those of the memory that each participant needs.
    participants : int
        How many may take part at most.
    **fields
        Values of other fields of the record.

    Attributes
    ----------
    kind : Kind
    participants : int
    template : numpy.ndarray
        The cells of the record but for its scratch memory.
    """

    def __init__(
        self,
        kind: Kind,
        numbers: Mapping[str, int],
        *,
        channels: int,
        partial: int,
        own: int,
        participants: int,
        **fields: float,
    ) -> None:
        self.kind, self.participants = kind, participants
        self._channels, self._step = channels, table_step(channels)
        scratch = 8 * (ROWS * self._step + partial)
        self.template = template(kind.geometry, participants, 8 * own, scratch)
        head = head_of(self.template, kind.geometry)
        for name, value in {**numbers, **fields}.items():
            head[name] = value
        self._size, self._table = int(head["bytes"][0]), int(head["scratch"][0]) // 8
        self._function: Callable[[int, int], int] | None = None
        self._spare: list[_Record] = []
        self._keeps = participants == 1 and self._size <= _KEPT

    def __call__(
        self,
        places: Sequence[int],
        *,
        momentum: float | None = None,
        count: int | None = None,
        sums: tuple[np.ndarray, np.ndarray] | None = None,
        summed: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> int:
        """Run the kernel; return the channel that was refused, or -1.

        Parameters
        ----------
        places : sequence of int
            All addresses, 0 where there is none: see `record.ADDRESSES`.
        momentum : float, optional
            Weight of the batch in the running statistics, if there are any.
        count : int, optional
            Elements of a channel that `sums` are over, instead of those here.
        sums : (float64 array, float64 array), optional
            Sums of every channel that came from elsewhere.
        summed : (float64 array, float64 array), optional
            Where to copy the sums of every channel.
        """
        function = self._function
        if function is None:
            function = self._function = library.function(self.kind)
        try:
            record = self._spare.pop()
        except IndexError:
            record = _Record(self.template, self._size)
        # All of them, because the record may be of an earlier call.
        _fill(record.cells, 0, *places)
        if momentum is not None:
            record.cells.view(np.float64)[_MOMENTUM] = momentum
        if count is not None:
            record.cells[_COUNT] = count
        if sums is not None:
            for row, values in zip((FIRST, SECOND), sums, strict=True):
                self._row(record, row)[...] = values
        if self.participants == 1:
            ended = function(record.address, 0)
        else:
            ended = self._together(function, record)
        if summed is not None:
            for row, values in zip((FIRST, SECOND), summed, strict=True):
                values[...] = self._row(record, row)
        if ended > 0:
            # Not one whose count is another than the stage's own. (A weight that is left over has
            # no meaning without running statistics.)
            if self._keeps and count is None:
                self._spare.append(record)
            return -1
        return -1 - ended

    def _together(self, function: Callable[[int, int], int], record: _Record) -> int:
        """Run the kernel with helpers."""
        record.cells[_BELL] = bell()
        done = summon(function, record.address, record, self.participants - 1)
        ended = function(record.address, 0)
        if ended == 0:
            wait(done)
            ended = function(record.address, JOINED)
        return ended

    def _row(self, record: _Record, row: int) -> Any:
        """Return a row of the table of channels."""
        start = self._table + row * self._step
        return record.cells[start : start + self._channels].view(np.float64)
