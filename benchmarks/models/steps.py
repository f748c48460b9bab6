"""Training steps of a model in any framework, and the memory that they take."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import backnorm
from backnorm import steps
from benchmarks.models.cases import Case

__all__ = ["CLASSES", "Step", "Trainer", "growth", "limit_processors", "reserve"]

#: The number of classes of every model.
CLASSES = 100


class Step(steps.Step, Protocol):
    """A training step that knows the time of normalisation in it."""

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if known."""


class Trainer(steps.Trainer, Protocol):
    """A model and a batch, the same in every process; each framework has one."""

    def __init__(self, case: Case) -> None: ...

    def step(self, variant: str) -> Step:
        """Return a step of a variant; all variants begin with the same parameters."""


def limit_processors(threads: int) -> None:
    """Limit this process to `threads` processors, and our kernels to `threads` threads.

    Call this before XLA and TensorFlow are imported, which start threads for all processors.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    backnorm.set_num_threads(threads)


def growth(step: Callable[[], object]) -> int:
    """Return the bytes by which resident memory grows in the first steps of a process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    for _ in range(3):
        step()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def reserve(step: Callable[[], object], size: int) -> None:
    """Give the allocator `size` more bytes of the system's memory, then make steps.

    An allocator that keeps all memory needs some ten steps until no step takes new pages, and more
    under a profiler, which allocates, too. Until then new pages take a tenth of a step's time, and
    more in some variants than in others. With twice the memory of the first steps, no step takes
    new pages.
    """
    # The system assigns memory when it is written to.
    bytearray(b"\1") * size
    step()
    step()
