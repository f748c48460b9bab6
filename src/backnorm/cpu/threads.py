"""Threads that help with a call: the same native function on the same record.

None of Numba's threading layers is used (docs/architecture.md has what each did when it was
tried). Kernels are serial and run without the GIL; a few daemon threads run the same kernel as the
caller, and each claims items until none is left (see `kernels.cursor`).

The caller never waits for a thread to start: if the others are late, busy with another
caller's work, or gone after a fork, it does all items itself. It only waits for items that
others have begun.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np

from backnorm.cpu.addresses import address_of

__all__ = ["bell", "summon", "wait"]


class _Pool:
    """Daemon threads waiting for work; started when first needed, forgotten in a forked child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Any] = SimpleQueue()
        self._started = 0
        self._count = np.zeros(1, np.int64)
        #: Where kernels ring when they begin.
        self.bell = address_of(self._count)

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
            function, address, memory, done = self._tasks.get()
            try:
                if function(address, index) == 1:
                    done.put(None)
            except BaseException as error:  # handed to the caller, who is waiting
                done.put(error)
            # Hold no memory while waiting for the next task.
            del function, memory, done


_pool = _Pool()


def _forget_pool() -> None:
    global _pool
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)


def bell() -> int:
    """Return what goes into the field `bell` of a record that helpers take part in."""
    return _pool.bell


def summon(
    function: Callable[[int, int], int], address: int, memory: object, helpers: int
) -> SimpleQueue[BaseException | None]:
    """Let so many helpers call `function(address, index)`; return what `wait` takes.

    `index` counts from 1, and is always the same number for the same thread. `memory` is what lives
    as long as any of them is at work.
    """
    done: SimpleQueue[BaseException | None] = SimpleQueue()
    _pool.submit((function, address, memory, done), helpers)
    return done


def wait(done: SimpleQueue[BaseException | None]) -> None:
    """Wait for the helpers that are at work on the last items."""
    error = done.get()
    if error is not None:
        raise error
