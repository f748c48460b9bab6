"""How participants share out the items of a record, in the kernels: claims, phases, waiting.

Kernels are serial; any number of participants run the same one on one record, and each claims items
with an atomic add until none is left. An item's result does not depend on who computes it, so the
bits are the same for any number of threads.

Each participant has its own range of the items and only then takes those of others. A thread thus
finds in the second phase of a call, and in the next call, what it has itself left in the cache:
processors often do not share the last-level cache that the system reports (on two virtual
processors of an AMD Zen 5, what the other had read came half as fast).

A kernel of two phases takes one call: starting a thread that sleeps costs more than a phase
of a middle-sized problem. For the same reason a thread that has run out of work stays awake
for a moment, without the GIL, and so does a caller whose items are all but done.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm.cpu.kernels.jit import inlined
from backnorm.cpu.record import CLAIMED, LINE, SLOTS

__all__ = [
    "arrive",
    "await_flag",
    "await_second",
    "begin",
    "claim",
    "enter",
    "finish",
    "leave",
    "open_second",
    "pause",
    "raise_flag",
]

_PARTICIPANTS, _BELL, _READY = SLOTS["participants"], SLOTS["bell"], SLOTS["ready"]
_DONE, _ARRIVED, _OPENED = SLOTS["done"], SLOTS["arrived"], SLOTS["opened"]
_ASLEEP, _RINGING, _RUNG = SLOTS["asleep"], SLOTS["ringing"], SLOTS["rung"]
_ENTERED = SLOTS["entered"]

# How often to look for more work, or for the last item, before going to sleep: 50 to 100 µs.
_PATIENCE = 2000

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


_ring_once, _enter = _adding(_RINGING, 1), _adding(_ENTERED, 1)
_finish, _arrive = _adding(_DONE, 1), _adding(_ARRIVED, 1)
_fall_asleep, _asleep = _adding(_ASLEEP, 1), _adding(_ASLEEP, 0)
_done = _adding(_DONE, 0)


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


@intrinsic
def _at(typingctx, address):
    """Return the count at an address, as the other threads have left it."""

    def codegen(context, builder, signature, arguments):
        cell = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.load_atomic(cell, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _add_at(typingctx, address):
    """Count up at an address; return the new count."""

    def codegen(context, builder, signature, arguments):
        one = ir.Constant(_I64, 1)
        cell = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.add(builder.atomic_rmw("add", cell, one, "seq_cst"), one)

    return types.int64(types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the processor that this is a loop that waits."""

    def codegen(context, builder, signature, arguments):
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.none(), codegen


@inlined
def await_flag(cells, position):
    """Wait until a cell is set."""
    while not _is_raised(cells, position):
        pause()


@inlined
def begin(cells, index):
    """Begin a call: the caller clears the cells, the others wait until the table is filled.

    Returns
    -------
    int
        Number of the participant, in the order in which they came: 0 for the caller.
    """
    if index == 0:
        cells[_DONE] = 0
        cells[_ARRIVED] = 0
        cells[_OPENED] = 0
        cells[_ASLEEP] = 0
        cells[_RINGING] = 0
        cells[_RUNG] = 0
        for phase in range(2 * cells[_PARTICIPANTS]):
            cells[CLAIMED + LINE * phase] = 0
        return 0
    # Nothing else is read before the caller has filled in the record, and the table.
    await_flag(cells, _READY)
    return 1 + _enter(cells)


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
def finish(cells, items):
    """Report one item as done; return whether all are now."""
    return _finish(cells) + 1 == items


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


@inlined
def enter(cells):
    """Begin to take part: ring the bell, if nobody has. Return how often it had rung then.

    The first thing that a kernel does: by now the caller has let go of the GIL, so that a thread
    that is awake gets it without waiting.
    """
    bell = cells[_BELL]
    if bell == 0:
        return 0
    if _ring_once(cells) == 0:
        cells[_RUNG] = _add_at(bell)
    # A latecomer must not take the bell of the next call for its own.
    return cells[_RUNG]


@inlined
def leave(cells, items, index, rung, last):
    """Stay for a moment; the last thing that a kernel does.

    Neither the caller nor a helper gives up its processor, or takes the GIL, before it has
    waited a little: the caller for the last items, a helper for the bell. Being woken takes longer
    than a small problem, and so does waiting for the GIL.

    Returns
    -------
    bool
        Caller: whether all items are done. Helper: whether it is for this one to wake the caller.
    """
    bell = cells[_BELL]
    if bell == 0:
        return last
    if index == 0:
        for _ in range(_PATIENCE):
            if last or _done(cells) == items:
                return True
            pause()
        _fall_asleep(cells)
        # Whoever did the last item before that did not see the caller asleep.
        return _done(cells) == items
    if last and _asleep(cells) != 0:
        return True
    for _ in range(_PATIENCE):
        if _at(bell) != rung:
            break
        pause()
    return False
