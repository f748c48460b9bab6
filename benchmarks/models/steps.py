"""Training steps of a model, whoever trains it, and whether what they compute is right."""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import backnorm
from benchmarks.models.cases import Case, Outcome, Variant

__all__ = [
    "Step",
    "Trainer",
    "compare",
    "growth",
    "limit_processors",
    "module_of",
    "reserve",
]

#: How many classes a model tells apart.
CLASSES = 100

#: So little that a thousand steps train nothing; and the share of the steps before in each.
RATE, MOMENTUM = 1e-7, 0.9

# A distance from float64 that is larger by so much than that of the framework's own layers is a
# fault, but for what comes of a few elements on the other side of a ReLU.
_WORST, _CHAOS = 2.0, 0.05

# Gradients so far off are none: those of an unrelated direction, as bfloat16 may give, are 1.4 off.
# PyTorch's convolution of three dimensions gives some of 1e34, or NaN, in bfloat16 on a Zen 5.
_LOST = 10.0


class Step(Protocol):
    """A training step: gradients of a loss, and a change of the parameters.

    Attributes
    ----------
    layers : int
        How many layers of batch normalisation are ours.
    """

    layers: int

    def __call__(self) -> None:
        """Make a step; it is done when this returns."""

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of all parameters; called once, before any step is made."""

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if known."""


class Trainer(Protocol):
    """A model and a batch, the same in every process. Of it there is one for each framework."""

    def __init__(self, case: Case) -> None: ...

    def step(self, variant: Variant) -> Step:
        """Return a step of a variant, which begins with the same parameters as every other."""

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""


def limit_processors(threads: int) -> None:
    """Let this process have so many processors, and our kernels so many threads.

    Call it before XLA or TensorFlow are imported: they make threads for all that they find then.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    backnorm.set_num_threads(threads)


def module_of(case: Case) -> Any:
    """Return the module of the framework that a case is of."""
    return importlib.import_module(case.framework.module)


def compare(trainer: Trainer, variants: Sequence[Variant]) -> dict[Variant, Outcome]:
    """Return error and layers of these variants, the framework's own first, or why it has none.

    One with a detail is not to be timed.
    """
    exact = trainer.exact()
    own, *others = variants
    found: dict[Variant, Outcome] = {}
    limit = float("inf")
    for variant in (own, *others):
        try:
            step = trainer.step(variant)
            off = _distance(step.gradients(), exact)
            if not off < _LOST:
                raise ArithmeticError(f"gradients are {off:.2g} off")
        except Exception as error:  # Whatever a compiler raises.
            found[variant] = Outcome(variant, f"{type(error).__name__}: {error}"[:200])
            if variant == own:
                # Nobody is judged without it, or timed.
                failed = f"not compared: {own} failed"
                return found | {each: Outcome(each, failed) for each in others}
            continue
        if variant == own:
            limit = max(_WORST * off, _CHAOS)
        detail = f"gradients are {off:.2g} off, more than {limit:.2g}" if off > limit else ""
        found[variant] = Outcome(variant, detail, error=off, layers=step.layers)
    return found


def growth(step: Callable[[], object]) -> int:
    """Return the bytes by which resident memory grows in the first steps of a process."""
    before = _resident()
    for _ in range(3):
        step()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def reserve(step: Callable[[], object], size: int) -> None:
    """Give the allocator so many more bytes of the system's memory, then make steps.

    One that keeps all memory needs some ten steps until it has what every step asks for, and while
    a profiler takes memory of its own, never does: new pages are a tenth of a step till then, and a
    third of normalisation, of one variant more than of another. With twice what steps take, no
    step needs any.
    """
    # Written to, as only then it is given.
    bytearray(b"\1") * size
    step()
    step()


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _distance(found: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> float:
    """Return how far gradients are from the exact ones, relative to their length."""
    pairs = [(np.asarray(one, np.float64), other) for one, other in zip(found, exact, strict=True)]
    off = sum(float(np.square(one - other).sum()) for one, other in pairs)
    length = sum(float(np.square(other).sum()) for _, other in pairs)
    return float(np.sqrt(off / length))
