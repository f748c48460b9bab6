"""How participants share out the items of a record, in the kernels: claims, phases, waiting.

Kernels are serial; any number of participants run the same one on one record, and each claims items
with an atomic add until none is left. An item's result does not depend on who computes it, so the
bits are the same for any number of threads.

Each participant has its own range of the items and only then takes those of others. A thread thus
finds in the second phase of a call, and in the next call, what it has itself left in the cache:
processors often do not share the last-level cache that the system reports (on two virtual
processors of an AMD Zen 5, what the other had read came half as fast).

A kernel of two phases takes one call: starting a thread that sleeps costs more than a phase
of a middle-sized problem. Whoever waits for others, which they have begun, watches for a moment,
then gives way, and then sleeps for moments: they may need this very processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.kernels.system import linger, now
from backnorm.cpu.record import CLAIMED, LINE, SLOTS

__all__ = [
    "arrive",
    "await_flag",
    "await_second",
    "claim",
    "claim_next",
    "finish",
    "open_second",
    "raise_flag",
]

_PARTICIPANTS, _DEADLINE = SLOTS["participants"], SLOTS["deadline"]
_DONE, _ARRIVED, _OPENED = SLOTS["done"], SLOTS["arrived"], SLOTS["opened"]

_I64 = ir.IntType(64)


def _adding(position: int, value: int) -> Any:
    """Return an intrinsic that adds `value` to a cell and returns what was there."""

    @intrinsic
    def add(typingctx, cells):
        def codegen(context, builder, signature, arguments):
            cell = builder.gep(arguments[0], [ir.Constant(_I64, position)])
            return builder.atomic_rmw("add", cell, ir.Constant(_I64, value), "seq_cst")

        return types.int64(cells), codegen

    return add


#: finish(cells): report one item as done.
finish = _adding(_DONE, 1)
_arrive = _adding(_ARRIVED, 1)


@intrinsic
def _count_up(typingctx, cells, position):
    """Count a cell up; return what it was."""

    def codegen(context, builder, signature, arguments):
        cell = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", cell, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(cells, types.intp), codegen


@intrinsic
def raise_flag(typingctx, cells, position):
    """Set a cell; who sees it set sees everything that was written before."""

    def codegen(context, builder, signature, arguments):
        cell = builder.gep(arguments[0], [arguments[1]])
        builder.store_atomic(ir.Constant(_I64, 1), cell, "release", 8)
        return context.get_dummy_value()

    return types.none(cells, types.intp), codegen


@intrinsic
def _is_raised(typingctx, cells, position):
    def codegen(context, builder, signature, arguments):
        cell = builder.gep(arguments[0], [arguments[1]])
        value = builder.load_atomic(cell, "acquire", 8)
        return builder.icmp_signed("!=", value, ir.Constant(_I64, 0))

    return types.boolean(cells, types.intp), codegen


@inlined
def await_flag(cells, position):
    """Wait until a cell is set."""
    looks = 0
    while not _is_raised(cells, position):
        linger(looks)
        looks += 1


@inlined
def claim(cells, summed, items, index):
    """Return an item nobody has claimed, or the number of items if there is none.

    The first `summed` come before the others. Participant `index` gets those of its own range
    first; the ranges of both phases are alike, and the second is gone through backwards.
    """
    parts = cells[_PARTICIPANTS]
    for phase in range(2):
        first, count = (0, summed) if phase == 0 else (summed, items - summed)
        for k in range(parts if count > 0 else 0):
            part, low, high = 0, first, first + count
            # A division takes longer than eight elements.
            if parts > 1:
                part = (index + k) % parts
                low, high = first + count * part // parts, first + count * (part + 1) // parts
            cell = CLAIMED + LINE * (phase * parts + part)
            if low + cells[cell] < high:
                claimed = low + _count_up(cells, cell)
                if claimed < high:
                    return claimed if phase == 0 else high - 1 - (claimed - low)
    return items


@inlined
def claim_next(cells, summed, items, index):
    """Return what `claim` does, unless the time of the call is up: then there is none.

    Not for the first item of a participant, so that a call always gets on.
    """
    if cells[_DEADLINE] != 0 and now() > cells[_DEADLINE]:
        return items
    return claim(cells, summed, items, index)


@inlined
def arrive(cells, summed):
    """Report one item of the first phase as done; return whether all of them are now."""
    return _arrive(cells) + 1 == summed


@inlined
def open_second(cells):
    """Let the participants that wait for the second phase begin it."""
    raise_flag(cells, _OPENED)


@inlined
def await_second(cells):
    """Wait until the second phase is open.

    Whoever comes here has claimed an item of it, so all of the first, of which there must be at
    least one, are claimed, by participants that are at work on them: the wait is no longer than
    an item.
    """
    await_flag(cells, _OPENED)
