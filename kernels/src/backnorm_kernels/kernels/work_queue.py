"""The work queue of a record, and the barrier between its two phases.

A kernel is serial code. Any number of participants run it on one record, and each takes items with
an atomic add until none is left. The result of an item does not depend on which participant
computes it, so the bits are the same for any number of threads.

Each participant takes the items of its own range first, and then steals items of other ranges. So
in the second phase of a call, and in the next call, a thread finds data of its range in the cache
of its processor. Processors often do not share the last-level cache that the system reports as
shared: on two virtual processors of an AMD Zen 5, a processor read data that only the other
processor had read before at half the speed of data that it had read itself.

Both phases of a kernel run in one call, because waking a thread costs more time than a phase of a
medium-sized problem. A participant that waits for others spins, then yields the processor, and then
sleeps for short times, because the other participants may need this processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from backnorm_kernels.kernels.jit import emitted, inlined
from backnorm_kernels.kernels.system import monotonic_ns, spin_wait
from backnorm_kernels.record import CLAIMED, LINE, SLOTS

_PARTICIPANTS, _DEADLINE = SLOTS["participants"], SLOTS["deadline"]
_DONE, _ARRIVED, _OPENED = SLOTS["done"], SLOTS["arrived"], SLOTS["opened"]

_I64 = ir.IntType(64)


def _counting(position: int) -> Any:
    """Return a function that adds 1 to a cell and returns its previous value."""

    @emitted(lambda cells: types.int64(cells))
    def count(builder, cells):
        cell = builder.gep(cells, [ir.Constant(_I64, position)])
        return builder.atomic_rmw("add", cell, ir.Constant(_I64, 1), "seq_cst")

    return count


#: complete_item(cells): count an item as done.
complete_item = _counting(_DONE)
_arrive = _counting(_ARRIVED)


@emitted(lambda cells, position: types.int64(cells, types.intp))
def _fetch_add(builder, cells, position):
    """Add 1 to a cell; return its previous value."""
    cell = builder.gep(cells, [position])
    return builder.atomic_rmw("add", cell, ir.Constant(_I64, 1), "acq_rel")


@emitted(lambda cells, position: types.none(cells, types.intp))
def set_flag(builder, cells, position):
    """Set a flag with release semantics."""
    cell = builder.gep(cells, [position])
    builder.store_atomic(ir.Constant(_I64, 1), cell, "release", 8)


@emitted(lambda cells, position: types.boolean(cells, types.intp))
def _is_set(builder, cells, position):
    """Return whether a flag is set, with acquire semantics."""
    cell = builder.gep(cells, [position])
    value = builder.load_atomic(cell, "acquire", 8)
    return builder.icmp_signed("!=", value, ir.Constant(_I64, 0))


@inlined
def wait_for_flag(cells, position):
    """Wait until a flag is set."""
    begin = monotonic_ns()
    while not _is_set(cells, position):
        spin_wait(begin)


@inlined
def take_item(cells, summed, items, index):
    """Take an item from the work queue; return it, or the number of items if none is left.

    The first `summed` items are those of the first phase, and are taken before those of the second
    phase. The items of each phase are divided into one range per participant. The participant
    `index` gets the items of its own range first. Items of the second phase are taken in reverse
    order, so that a participant begins with the data that it read last.
    """
    parts = cells[_PARTICIPANTS]
    for phase in range(2):
        first, count = (0, summed) if phase == 0 else (summed, items - summed)
        for k in range(parts if count > 0 else 0):
            part, low, high = 0, first, first + count
            # The divisions below take longer than computing eight elements. A single participant
            # does not need them, because its range is the whole range.
            if parts > 1:
                part = (index + k) % parts
                low, high = first + count * part // parts, first + count * (part + 1) // parts
            cell = CLAIMED + LINE * (phase * parts + part)
            if low + cells[cell] < high:
                taken = low + _fetch_add(cells, cell)
                if taken < high:
                    return taken if phase == 0 else high - 1 - (taken - low)
    return items


@inlined
def take_next_item(cells, summed, items, index):
    """Take an item as `take_item` does, unless the deadline of the call has passed.

    After the deadline, return `items`, the number of items, as `take_item` does if no item is left.
    A participant takes its first item by `take_item`, which does not check the deadline, so that
    every call makes progress.
    """
    if cells[_DEADLINE] != 0 and monotonic_ns() > cells[_DEADLINE]:
        return items
    return take_item(cells, summed, items, index)


@inlined
def arrive_at_barrier(cells, summed):
    """Count an item of the first phase as summed; return whether it was the last of them."""
    return _arrive(cells) + 1 == summed


@inlined
def open_barrier(cells):
    """Release the participants that wait at the barrier."""
    set_flag(cells, _OPENED)


@inlined
def wait_at_barrier(cells):
    """Wait until the barrier is open.

    A participant waits here after it has taken an item of the second phase. By then, all items of
    the first phase have been taken, and other participants compute the last ones. The wait takes at
    most the time of one item and of combining the sums. The first phase must have at least one
    item, because its last item opens the barrier.
    """
    wait_for_flag(cells, _OPENED)
