"""Training steps of a model in any framework, and the judgement of their gradients."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

import backnorm
from benchmarks.models.cases import Case

__all__ = ["CLASSES", "MOMENTUM", "RATE", "Comparison", "Step", "Trainer", "compare", "growth",
           "limit_processors", "reserve"]  # fmt: skip

#: The number of classes of every model.
CLASSES = 100

#: A learning rate so small that a thousand steps train nothing; and the momentum.
RATE, MOMENTUM = 1e-7, 0.9

# A distance from float64 that is larger by so much than that of the framework's own layers is a
# fault, unless it is so small that a few elements on the other side of a ReLU explain it.
_WORST, _CHAOS = 2.0, 0.05

# Gradients of an unrelated direction, as bfloat16 may give, are 1.4 off. PyTorch's convolution of
# three dimensions gives some of 1e34, or NaN, in bfloat16 on a Zen 5.
_LOST = 10.0


class Step(Protocol):
    """A training step: gradients of a loss, and a change of the parameters.

    Attributes
    ----------
    layers : int
        Layers of batch normalisation that are ours.
    """

    layers: int

    def __call__(self) -> None:
        """Make a step; it is done when this returns."""

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of all parameters; called once, before any step is made."""

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if known."""


class Trainer(Protocol):
    """A model and a batch, the same in every process; each framework has one."""

    def __init__(self, case: Case) -> None: ...

    def step(self, variant: str) -> Step:
        """Return a step of a variant, which begins with the same parameters as every other."""

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""


class Comparison(NamedTuple):
    """The distance of a variant's gradients from float64, or why it is not to be timed."""

    detail: str = ""
    error: float | None = None
    layers: int = 0


def limit_processors(threads: int) -> None:
    """Limit this process to so many processors, and our kernels to so many threads.

    Must precede the import of XLA and TensorFlow, which make threads for all processors.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    backnorm.set_num_threads(threads)


def compare(trainer: Trainer, variants: Sequence[str]) -> dict[str, Comparison]:
    """Judge these variants, the framework's own layers first."""
    exact = trainer.exact()
    own, *others = variants
    found: dict[str, Comparison] = {}
    limit = float("inf")
    for variant in (own, *others):
        try:
            step = trainer.step(variant)
            off = _distance(step.gradients(), exact)
            if not off < _LOST:
                raise ArithmeticError(f"gradients are {off:.2g} off")
        except Exception as error:  # a compiler can raise any
            found[variant] = Comparison(f"{type(error).__name__}: {error}"[:200])
            if variant == own:
                # Without it nothing can be judged or compared.
                failed = Comparison(f"not compared: {own} failed")
                return found | dict.fromkeys(others, failed)
            continue
        if variant == own:
            limit = max(_WORST * off, _CHAOS)
        detail = f"gradients are {off:.2g} off, more than {limit:.2g}" if off > limit else ""
        found[variant] = Comparison(detail, off, step.layers)
    return found


def growth(step: Callable[[], object]) -> int:
    """Return the bytes by which resident memory grows in the first steps of a process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    before = pages * resource.getpagesize()
    for _ in range(3):
        step()
    return max(0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)


def reserve(step: Callable[[], object], size: int) -> None:
    """Give the allocator so many more bytes of the system's memory, then make steps.

    An allocator that keeps all memory needs some ten steps until no step takes new pages, and
    longer under a profiler, which takes memory of its own; new pages are a tenth of a step till
    then, and of one variant more than of another. With twice what steps take, no step takes any.
    """
    # The system gives memory when it is written to.
    bytearray(b"\1") * size
    step()
    step()


def _distance(found: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> float:
    """Return how far gradients are from the exact ones, relative to their length."""
    pairs = [(np.asarray(one, np.float64), other) for one, other in zip(found, exact, strict=True)]
    off = sum(float(np.square(one - other).sum()) for one, other in pairs)
    length = sum(float(np.square(other).sum()) for _, other in pairs)
    return float(np.sqrt(off / length))
