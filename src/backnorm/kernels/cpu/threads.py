"""Threads: one kernel run by several participants that claim items from a shared cursor.

None of Numba's threading layers is used (docs/architecture.md has what each did when it was
tried: one ends a forked child, one ends the process when two Python threads enter it, one is
an extra package). Kernels are serial and release the GIL; a few daemon threads run the same
kernel as the caller, and each claims items with an atomic add until none is left. An item's
result does not depend on who computes it, so the bits are the same for any number of threads.

Each participant has its own range of the items and only then takes those of others. A thread thus
finds in the second phase of a call, and in the next call, what it has itself left in the cache:
processors often do not share the last-level cache that the system reports (on two virtual
processors of an AMD Zen 5, what the other had read came half as fast).

The caller never waits for a thread to start: if the others are late, busy with another
caller's work, or gone after a fork, it does all items itself. It only waits for items that
others have begun.

A kernel of two phases takes one launch: starting a thread that sleeps costs more than a phase
of a middle-sized problem. For the same reason a thread that has run out of work stays awake
for a moment, without the GIL, and so does a caller whose items are all but done.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backnorm.kernels.cpu.jit import inlined

__all__ = [
    "DONE_CELL",
    "arrive",
    "await_flag",
    "await_second",
    "cells",
    "claim",
    "enter",
    "finish",
    "leave",
    "open_second",
    "parallel",
    "raise_flag",
    "summon",
    "wait",
]


# Cells of a cursor: participants, items done, items of the first phase done, first phase over,
# caller asleep, address of the bell (0: nobody else takes part), whether it is being rung, and how
# often it has rung then. From _CLAIMED on, for each phase and participant, how many items of that
# range are claimed, a cache line each.
_PARTS, _DONE, _ARRIVED, _OPEN, _ASLEEP, _BELL, _RINGING, _RUNG, _CLAIMED = range(9)
_LINE = 8

#: Where a cursor counts the items that are done.
DONE_CELL = _DONE

# How often to look for more work, or for the last item, before going to sleep: 50 to 100 µs.
_PATIENCE = 2000


def _cell(context: Any, builder: Any, kind: Any, cursor: Any, position: int) -> Any:
    return builder.gep(
        _cells(context, builder, kind, cursor), [ir.Constant(ir.IntType(64), position)]
    )


def _cells(context: Any, builder: Any, kind: Any, cursor: Any) -> Any:
    if isinstance(kind, types.CPointer):
        return cursor
    return context.make_array(kind)(context, builder, cursor).data


def _count(position: int) -> Any:
    """Return an intrinsic that counts a cell up and returns whether it reached `goal`."""

    @intrinsic
    def count(typingctx, cursor, goal):
        def codegen(context, builder, signature, arguments):
            cell = _cell(context, builder, cursor, arguments[0], position)
            one = ir.Constant(ir.IntType(64), 1)
            before = builder.atomic_rmw("add", cell, one, "acq_rel")
            return builder.icmp_signed("==", builder.add(before, one), arguments[1])

        return types.boolean(cursor, types.intp), codegen

    return count


#: finish(cursor, items): report one item as done; return whether all `items` are now.
finish = _count(_DONE)
#: arrive(cursor, items): the same for the items of the first of two phases.
arrive = _count(_ARRIVED)


@intrinsic
def _count_up(typingctx, cursor, position):
    """Count a cell up; return what it was."""

    def codegen(context, builder, signature, arguments):
        cells = _cells(context, builder, cursor, arguments[0])
        cell = builder.gep(cells, [arguments[1]])
        return builder.atomic_rmw("add", cell, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(cursor, types.intp), codegen


@inlined
def claim(cursor, summed, items, index):
    """Return an item nobody has claimed, or the number of items if there is none.

    The first `summed` come before the others. Participant `index` gets those of its own range
    first; the ranges of both phases are alike, and the second is gone through backwards.
    """
    parts = cursor[_PARTS]
    for phase in range(2):
        first, count = (0, summed) if phase == 0 else (summed, items - summed)
        for k in range(parts if count > 0 else 0):
            part = (index + k) % parts
            low, high = first + count * part // parts, first + count * (part + 1) // parts
            cell = _CLAIMED + _LINE * (phase * parts + part)
            if low + cursor[cell] < high:
                claimed = low + _count_up(cursor, cell)
                if claimed < high:
                    return claimed if phase == 0 else high - 1 - (claimed - low)
    return items


@intrinsic
def raise_flag(typingctx, cells, position):
    """Set a cell; who sees it set sees everything that was written before."""

    def codegen(context, builder, signature, arguments):
        cell = builder.gep(_cells(context, builder, cells, arguments[0]), [arguments[1]])
        builder.store_atomic(ir.Constant(ir.IntType(64), 1), cell, "release", 8)
        return context.get_dummy_value()

    return types.none(cells, types.intp), codegen


@intrinsic
def _is_raised(typingctx, cells, position):
    def codegen(context, builder, signature, arguments):
        cell = builder.gep(_cells(context, builder, cells, arguments[0]), [arguments[1]])
        value = builder.load_atomic(cell, "acquire", 8)
        return builder.icmp_signed("!=", value, ir.Constant(ir.IntType(64), 0))

    return types.boolean(cells, types.intp), codegen


@inlined
def await_flag(cells, position):
    """Wait until a cell is set."""
    while not _is_raised(cells, position):
        _pause()


@inlined
def open_second(cursor):
    """Let the participants that wait for the second phase begin it."""
    raise_flag(cursor, _OPEN)


@intrinsic
def _at(typingctx, address):
    """Return the count at an address, as the other threads have left it."""

    def codegen(context, builder, signature, arguments):
        cell = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(cell, "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _add_at(typingctx, address):
    """Count up at an address; return the new count."""

    def codegen(context, builder, signature, arguments):
        one = ir.Constant(ir.IntType(64), 1)
        cell = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.add(builder.atomic_rmw("add", cell, one, "seq_cst"), one)

    return types.int64(types.int64), codegen


def _adding(position: int, value: int) -> Any:
    """Return an intrinsic that adds `value` to a cell and returns what was there."""

    @intrinsic
    def add(typingctx, cursor):
        def codegen(context, builder, signature, arguments):
            cell = _cell(context, builder, cursor, arguments[0], position)
            return builder.atomic_rmw("add", cell, ir.Constant(ir.IntType(64), value), "seq_cst")

        return types.int64(cursor), codegen

    return add


_ring_once = _adding(_RINGING, 1)
_fall_asleep, _asleep = _adding(_ASLEEP, 1), _adding(_ASLEEP, 0)
_done = _adding(_DONE, 0)


@intrinsic
def _pause(typingctx):
    """Tell the processor that this is a loop that waits."""

    def codegen(context, builder, signature, arguments):
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith("x86_64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(
                cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), []
            )
        return context.get_dummy_value()

    return types.none(), codegen


@inlined
def enter(cursor):
    """Begin to take part: ring the bell, if nobody has. Return how often it had rung then.

    The first thing that a kernel does: by now the caller has let go of the GIL, so that a thread
    that is awake gets it without waiting.
    """
    bell = cursor[_BELL]
    if bell == 0:
        return 0
    if _ring_once(cursor) == 0:
        cursor[_RUNG] = _add_at(bell)
    # A latecomer must not take the bell of the next call for its own.
    return cursor[_RUNG]


@inlined
def leave(cursor, items, index, rung, last):
    """Stay for a moment; the last thing that a kernel does.

    Neither the caller nor a helper gives up its processor, or takes the GIL, before it has
    waited a little: the caller for the last items, a helper for the bell. Being woken takes longer
    than a small problem, and so does waiting for the GIL.

    Returns
    -------
    bool
        Caller: whether all items are done. Helper: whether it is for this one to wake the caller.
    """
    bell = cursor[_BELL]
    if bell == 0:
        return last
    if index == 0:
        for _ in range(_PATIENCE):
            if last or _done(cursor) == items:
                return True
            _pause()
        _fall_asleep(cursor)
        # Whoever did the last item before that did not see the caller asleep.
        return _done(cursor) == items
    if last and _asleep(cursor) != 0:
        return True
    for _ in range(_PATIENCE):
        if _at(bell) != rung:
            break
        _pause()
    return False


@inlined
def await_second(cursor):
    """Wait until the second phase is open.

    Whoever comes here has claimed an item of it, so all of the first, of which there must be at
    least one, are claimed, by participants that are at work on them: the wait is no longer than
    an item.
    """
    await_flag(cursor, _OPEN)


class _Pool:
    """Daemon threads waiting for work; started when first needed, forgotten in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._started = 0
        self._bell = np.zeros(1, np.int64)
        #: Where kernels ring when they begin.
        self.bell = self._bell.ctypes.data

    def submit(self, task: Any, copies: int) -> None:
        if self._started < copies:
            self._start(copies)
        for _ in range(copies):
            self._tasks.put(task)

    def _start(self, wanted: int) -> None:
        with self._lock:
            while self._started < wanted:
                self._started += 1
                threading.Thread(
                    target=self._work, args=(self._started,), name="backnorm", daemon=True
                ).start()

    def _work(self, index: int) -> None:
        while True:
            kernel, arguments, done = self._tasks.get()
            try:
                if kernel(*arguments, index) == 1:
                    done.put(None)
            except BaseException as error:  # handed to the caller, who is waiting
                done.put(error)
            # Hold no array while waiting for the next task.
            del kernel, arguments, done


_pool = _Pool()


def _forget_pool() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def cells(participants: int) -> np.ndarray:
    """Return the cells of a new cursor for so many participants."""
    cursor = np.zeros(_CLAIMED + 2 * _LINE * participants, np.int64)
    cursor[_PARTS] = participants
    return cursor


def summon(kernel: Any, arguments: tuple[Any, ...], cursor: np.ndarray, helpers: int) -> Any:
    """Let so many helpers call `kernel(*arguments, index)`; return what `wait` takes.

    `index` counts from 1, and is always the same number for the same thread. The kernel begins
    with `enter`, claims items, calls `finish` after each, and returns what `leave` returns, or 1
    for it.
    """
    pool = _pool
    cursor[_BELL] = pool.bell
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    pool.submit((kernel, arguments, done), helpers)
    return done


def wait(done: Any) -> None:
    """Wait for the helpers that are at work on the last items."""
    error = done.get()
    if error is not None:
        raise error


def parallel(
    kernel: Any, arguments: tuple[Any, ...], summed: int, items: int, threads: int
) -> None:
    """Run `kernel(*arguments, cursor, summed, items, index)` on up to `threads` threads.

    It returns when all items, of which the first `summed` come before the others, are done; `index`
    is 0 for the caller, and otherwise as in `summon`.
    """
    if items == 0:
        return
    participants = min(threads, items)
    cursor = cells(participants)
    call = (*arguments, cursor, summed, items)
    if participants == 1:
        kernel(*call, 0)
        return
    done = summon(kernel, call, cursor, participants - 1)
    if not kernel(*call, 0):
        wait(done)
