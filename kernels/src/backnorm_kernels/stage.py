"""Call a kernel: fill in a record, and call one native function.

The arguments of a kernel are the address of a record (`record` describes its fields) and the index
of a participant. The native function is the one that `threads.runner` returns. It calls the kernel
in several threads; the record says in how many at most. When this function returns, no other thread
uses the record. Therefore, while another thread uses the record, the calling thread runs no signal
handler, raises no exception and does not fork. If the kernel is not finished after a tenth of a
second, the native function returns nevertheless. Python then runs signal handlers, and the stage
calls the native function again.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from backnorm.addresses import address_of
from backnorm.allocation import aligned
from backnorm_kernels import library
from backnorm_kernels.kinds import Kind
from backnorm_kernels.record import ADDRESSES, SLOTS, head_of, template
from backnorm_kernels.scratch import ROWS, table_pitch
from backnorm_kernels.threads import region, runner

# Every call fills in the first fields of a record: the addresses, "ready", "region" and "function".
# Writing a field takes 25 ns less with "n", a native format of `struct`, than with "q", a format of
# fixed size.
_fill = struct.Struct(f"{len(ADDRESSES) + 3}n").pack_into
_weigh = struct.Struct("d").pack_into
_MOMENTUM, _COUNT, _EXCHANGED = map(SLOTS.__getitem__, ("momentum", "count", "exchanged"))

_CELL = np.dtype(np.int64)

# If the native function has not finished after this many nanoseconds, it returns, so that Python
# can run signal handlers; it is then called again.
_LIMIT = 100_000_000

# A stage keeps a record for its next call if the record has at most this many bytes. If several
# threads call a stage at the same time, each of these calls has a record of its own.
_KEPT = 1 << 16

# Larger records, of up to `_LARGEST` bytes, get memory of `_LARGEST` bytes, which is kept in one
# store for all stages, so the memory of the last call serves the next one, whatever its size. The
# store holds at most `_MOST` records. Example: a backward pass of shape (8, 256, 40, 40) in NXC has
# a record of 490 KB. If each call allocated a new record, the call took up to 1.4 times as long as
# with a kept record (Intel Xeon, 2 threads).
_LARGEST, _MOST = 2 << 20, 8


class _Record:
    """The memory of a record, which begins at a cache line. `cells` is this memory as an array of
    int64, and `view` is the memoryview of `cells`.
    """

    __slots__ = ("address", "cells", "view")

    def __init__(self, cells: np.ndarray, size: int) -> None:
        self.cells = aligned((size // 8,), _CELL)
        self.cells[: cells.size] = cells
        self.address, self.view = address_of(self.cells), self.cells.data


# Any thread or finaliser may take or add a record at any time. So the store of records is a deque,
# because the operations of a deque are atomic.
_large: deque[_Record] = deque(maxlen=_MOST)


def _record(cells: np.ndarray, size: int) -> _Record:
    """Return a record with these first cells and at least this size, kept or new."""
    if not _KEPT < size <= _LARGEST:
        return _Record(cells, size)
    try:
        record = _large.pop()
    except IndexError:
        return _Record(cells, _LARGEST)
    record.cells[: cells.size] = cells
    return record


class Stage:
    """A kernel and its record. Each call writes the addresses of its arrays to the record.

    Parameters
    ----------
    kind : Kind
    numbers : mapping of str to int
        The geometry's fields.
    channels : int
        The number of channels in the table of channels.
    partial : int
        Float64 elements of the partial sums.
    own : int
        Float64 elements of the memory of each participant.
    participants : int
        The largest number of participants.
    header : int
        `addresses.HEADER` if a call gets the addresses of NumPy's array objects; 0 if it gets the
        addresses of elements.
    **fields
        Values of other fields of the record.

    Attributes
    ----------
    kind : Kind
    participants : int
    template : numpy.ndarray
        The cells of the record without its scratch memory.
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
        header: int = 0,
        **fields: float,
    ) -> None:
        self.kind, self.participants, self._header = kind, participants, header
        scratch = 8 * (ROWS * table_pitch(channels) + partial)
        self.template = template(kind.geometry, participants, 8 * own, scratch)
        head = head_of(self.template, kind.geometry)
        for name, value in {**numbers, **fields, "limit": _LIMIT}.items():
            head[name] = value
        self._size, self._count = int(head["bytes"][0]), int(head["count"][0])
        self._function = 0
        self._spare: list[_Record] = []
        self._keeps = self._size <= _KEPT

    def __call__(
        self,
        addresses: Sequence[int],
        *,
        momentum: float | None = None,
        count: int | None = None,
        sums: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> int:
        """Run the kernel; return the first channel with an invalid variance, or -1.

        Parameters
        ----------
        addresses : sequence of int
            The addresses of `record.ADDRESSES`, 0 for an absent array.
        momentum : float, optional
            Weight of the batch in the running statistics, if there are any.
        count : int, optional
            The number of elements per channel that were summed, if it is not that of x.
        sums : (float64 array, float64 array), optional
            Sums, or moments, of every channel that the caller provides instead of `exchanged`.
        """
        function = self._function
        if not function:
            function = self._function = library.address(self.kind)
        try:
            record = self._spare.pop()
        except IndexError:
            record = _record(self.template, self._size)
        # Every field is filled in, because an earlier call may have used the record. The 0 after
        # the addresses is the value of the record's field `ready`.
        team = 0 if self.participants == 1 else region()
        _fill(record.view, 0, *addresses, 0, team, function)
        if momentum is not None:
            _weigh(record.view, 8 * _MOMENTUM, momentum)
        if count is not None:
            record.view[_COUNT] = count
        if sums is not None:
            rows = np.array(sums, np.float64)
            record.view[_EXCHANGED] = id(rows) if self._header else address_of(rows)
        run = runner()
        ended = run(record.address, self._header)
        while not ended:
            ended = run(record.address, 0)
        if ended > 0:
            # The momentum of this call stays in the record. It does no harm there: the next call
            # with this record writes its own momentum, or has no running statistics and reads no
            # momentum.
            if self._keeps:
                if count is not None:
                    record.view[_COUNT] = self._count
                self._spare.append(record)
            elif _KEPT < self._size <= _LARGEST:
                _large.append(record)
            return -1
        return -1 - ended
