"""The package made to work in memory between unreadable pages.

What it allocates (results, copies that kernels read, records) comes from an arena while that is
switched on; else the package is as users have it. Plans are for a made-up machine, and may be
changed to any legal one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from elsewhere import module_of
from memory import Arena, address_of

import backnorm
from backnorm import arrays, engines
from backnorm.layout import MARK_BYTES
from backnorm.machine import Machine
from backnorm_kernels import engine, stage
from backnorm_kernels.record import SLOTS

__all__ = ["Guarded"]

_CELL = np.dtype(np.int64)

# A record that is kept for the next call would stay where it is.
_NOTHING = -1


class _Record:
    """The attributes of a record that `stage` keeps."""

    __slots__ = ("address", "cells", "view")

    def __init__(self, arena: Arena, template: np.ndarray) -> None:
        # All that participants share lies together; what each has of its own lies apart.
        shared = int(template[SLOTS["own"]])
        self.cells = arena.array("the record", (shared // 8,), _CELL)
        self.cells[: template.size] = template
        self.address, self.view = address_of(self.cells), memoryview(self.cells)
        size, count = int(template[SLOTS["own_bytes"]]), int(template[SLOTS["participants"]])
        first, step = arena.pieces("the memory of a participant", size, count)
        self.cells[SLOTS["own"]], self.cells[SLOTS["own_bytes"]] = first - self.address, step


class Guarded:
    """The package with an arena.

    Attributes
    ----------
    arena : Arena
    machine : Machine
        What is planned for.
    change : callable or None
        From a plan to the one that is followed.
    plans : list of Plan
        What was planned since the last problem began.
    """

    def __init__(self) -> None:
        self.arena = Arena()
        self.machine = Machine(1, 0, 0, "made up")
        self.change: Callable[[Any], Any] | None = None
        self.plans: list[Any] = []
        # The plans that are legal beside the one that is planned.
        self.forced = module_of("engine/test_forced_plans.py")
        self._on = False
        self._install()

    @contextlib.contextmanager
    def on(self, end: str) -> Iterator[Arena]:
        """Let the package allocate in the arena, where arrays lie at this end of a stretch."""
        self.arena.end, self._on = end, True
        try:
            yield self.arena
        finally:
            self._on = False

    def begin(self) -> None:
        """Begin a problem: nothing is known of earlier ones."""
        backnorm.executable.forget()
        self.arena.reset()
        self.plans.clear()

    def _install(self) -> None:
        arrays.NumPy.new = self._allocating(arrays.NumPy.new)
        for name in ("in_order", "dense"):
            setattr(arrays, name, self._copying(getattr(arrays, name)))
        stage._KEPT = stage._LARGEST = _NOTHING
        stage._record = self._recording(stage._record)
        engines.this_machine = lambda: self.machine
        engine.plan = self._planning(engine.plan)

    def _allocating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def new(*arguments: Any) -> list[Any]:
            results = []
            for made in original(*arguments):
                array = self.arena.array("a result", made.shape, made.dtype) if self._on else made
                is_mask = made.dtype == np.uint8
                # A mask ends with the order of its bits.
                mark = made[-MARK_BYTES:].copy() if is_mask else None
                if not self._on:
                    array.fill({"u": 0xFF, "i": -1}.get(made.dtype.kind, np.nan))
                if is_mask:
                    array[-MARK_BYTES:] = mark
                results.append(array)
            return results

        return new

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def copy(array: np.ndarray, *options: Any) -> np.ndarray:
            made = original(array, *options)
            if not self._on or made is array or np.may_share_memory(made, array):
                return made
            return self.arena.array(
                "a copy of an operand", made.shape, made.dtype,
                content=made.reshape(-1), read_only=True,
            )  # fmt: skip

        return copy

    def _recording(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def record(template: np.ndarray, size: int) -> Any:
            return _Record(self.arena, template) if self._on else original(template, size)

        return record

    def _planning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def plan(*arguments: Any) -> Any:
            decided = original(*arguments)
            if self.change is not None:
                decided = self.change(decided)
            self.plans.append(decided)
            return decided

        return plan
