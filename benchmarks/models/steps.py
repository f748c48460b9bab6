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

# Gradients are wrong if their distance from float64 is more than `_WORST` times that of the
# framework's own layers, and more than `_CHAOS`, which a few sign changes at a ReLU can explain.
_WORST, _CHAOS = 2.0, 0.05

# Gradients with a larger distance are not compared at all. Gradients of an unrelated direction,
# which bfloat16 may give, have a distance of 1.4. PyTorch's convolution of three dimensions returns
# elements of 1e34 or NaN in bfloat16 on a Zen 5.
_LOST = 10.0


class Step(Protocol):
    """A training step: gradients of a loss, and a change of the parameters.

    Attributes
    ----------
    layers : int
        The number of our batch normalisation layers.
    fused : int
        How many of them `convert(fuse=True)` of `backnorm.torch` fused.
    """

    layers: int
    fused: int

    def __call__(self) -> None:
        """Make a step; it is complete when this returns."""

    def gradients(self) -> list[np.ndarray]:
        """Return the gradients of all parameters; called once, before any step is made."""

    def normalization(self) -> float | None:
        """Return the seconds of a step in normalisation, activations and additions, if known."""


class Trainer(Protocol):
    """A model and a batch, the same in every process; each framework has one."""

    def __init__(self, case: Case) -> None: ...

    def step(self, variant: str) -> Step:
        """Return a step of a variant; all variants begin with the same parameters."""

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""


class Comparison(NamedTuple):
    """The distance of a variant's gradients from float64, or the reason not to time it."""

    detail: str = ""
    error: float | None = None
    layers: int = 0
    fused: int = 0


def limit_processors(threads: int) -> None:
    """Limit this process to `threads` processors, and our kernels to `threads` threads.

    Call this before XLA and TensorFlow are imported, which start threads for all processors.
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
                # Without the framework's own layers nothing can be judged or compared.
                failed = Comparison(f"not compared: {own} failed")
                return found | dict.fromkeys(others, failed)
            continue
        if variant == own:
            limit = max(_WORST * off, _CHAOS)
        detail = f"gradients are {off:.2g} off, more than {limit:.2g}" if off > limit else ""
        found[variant] = Comparison(detail, off, step.layers, step.fused)
    return found


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


def _distance(found: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> float:
    """Return the distance of gradients from the exact ones, relative to the exact length."""
    pairs = [(np.asarray(one, np.float64), other) for one, other in zip(found, exact, strict=True)]
    off = sum(float(np.square(one - other).sum()) for one, other in pairs)
    length = sum(float(np.square(other).sum()) for _, other in pairs)
    return float(np.sqrt(off / length))
