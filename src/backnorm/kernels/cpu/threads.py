"""Threads: one kernel run by several participants that claim items from a shared cursor.

None of Numba's threading layers is used (docs/architecture.md has what each did when it was
tried: one ends a forked child, one ends the process when two Python threads enter it, one is
an extra package). Kernels are serial and release the GIL; a few daemon threads run the same
kernel as the caller, and each claims the next item with an atomic add until none is left. An
item's result does not depend on who computes it, so the bits are the same for any number of
threads.

The caller never waits for a thread to start: if the others are late, busy with another
caller's work, or gone after a fork, it does all items itself. It only waits for items that
others have begun.

A kernel of two phases takes one launch: starting a thread that sleeps costs more than a phase
of a middle-sized problem.
"""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backnorm.kernels.cpu.jit import inlined

__all__ = ["arrive", "await_second", "claim", "finish", "open_second", "parallel"]


# Cells of a cursor: items claimed, items done, items of the first phase done, first phase over.
_CLAIMED, _DONE, _ARRIVED, _OPEN = range(4)
_CELLS = 4


def _cell(context: Any, builder: Any, kind: Any, cursor: Any, position: int) -> Any:
    data = context.make_array(kind)(context, builder, cursor).data
    return builder.gep(data, [ir.Constant(ir.IntType(64), position)])


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
def claim(typingctx, cursor):
    """Return the next item nobody has claimed; at or past the number of items, there is none."""

    def codegen(context, builder, signature, arguments):
        cell = _cell(context, builder, cursor, arguments[0], _CLAIMED)
        return builder.atomic_rmw("add", cell, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.intp(cursor), codegen


@intrinsic
def open_second(typingctx, cursor):
    """Let the participants that wait for the second phase begin it."""

    def codegen(context, builder, signature, arguments):
        cell = _cell(context, builder, cursor, arguments[0], _OPEN)
        builder.store_atomic(ir.Constant(ir.IntType(64), 1), cell, "release", 8)
        return context.get_dummy_value()

    return types.none(cursor), codegen


@intrinsic
def _is_open(typingctx, cursor):
    def codegen(context, builder, signature, arguments):
        cell = _cell(context, builder, cursor, arguments[0], _OPEN)
        value = builder.load_atomic(cell, "acquire", 8)
        return builder.icmp_signed("!=", value, ir.Constant(ir.IntType(64), 0))

    return types.boolean(cursor), codegen


@inlined
def await_second(cursor):
    """Wait until the second phase is open.

    Whoever comes here has claimed an item of it, so all of the first, of which there must be at
    least one, are claimed, by participants that are at work on them: the wait is no longer than
    an item.
    """
    while not _is_open(cursor):
        pass


class _Pool:
    """Daemon threads waiting for work; started when first needed, forgotten in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._started = 0

    def submit(self, task: Any, copies: int) -> None:
        if self._started < copies:
            self._start(copies)
        for _ in range(copies):
            self._tasks.put(task)

    def _start(self, wanted: int) -> None:
        with self._lock:
            while self._started < wanted:
                threading.Thread(
                    target=_work, args=(self._tasks,), name="backnorm", daemon=True
                ).start()
                self._started += 1


def _work(tasks: SimpleQueue[Any]) -> None:
    while True:
        kernel, arguments, done = tasks.get()
        try:
            if kernel(*arguments):
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


def parallel(kernel: Any, arguments: tuple[Any, ...], items: int, threads: int) -> None:
    """Run `kernel(*arguments, cursor, items)` on up to `threads` threads until all items are done.

    The kernel claims items from the cursor, calls `finish` after each, and returns whether it
    finished the last one.
    """
    if items == 0:
        return
    call = (*arguments, np.zeros(_CELLS, np.int64), items)
    helpers = min(threads, items) - 1
    if helpers < 1:
        kernel(*call)
        return
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    _pool.submit((kernel, call, done), helpers)
    if not kernel(*call):
        error = done.get()
        if error is not None:
            raise error
