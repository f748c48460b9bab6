"""Training steps of any framework: their gradients are judged, then they are timed in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

__all__ = ["MOMENTUM", "RATE", "Judgement", "Step", "Trainer", "judge", "order", "take_turns"]

Key = TypeVar("Key", bound=Hashable)

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


class Trainer(Protocol):
    """A model and a batch."""

    def step(self, variant: str) -> Step:
        """Return a step of a variant; all variants begin with the same parameters."""

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""


class Judgement(NamedTuple):
    """The distance of a variant's gradients from float64, or the reason not to time it."""

    detail: str = ""
    error: float | None = None
    layers: int = 0
    fused: int = 0


def judge(trainer: Trainer, variants: Sequence[str]) -> dict[str, Judgement]:
    """Judge the gradients of these variants, the framework's own layers first."""
    exact = trainer.exact()
    own, *others = variants
    found: dict[str, Judgement] = {}
    limit = math.inf
    for variant in (own, *others):
        try:
            step = trainer.step(variant)
            off = _distance(step.gradients(), exact)
            if not off < _LOST:
                raise ArithmeticError(f"gradients are {off:.2g} off")
        except Exception as error:  # a compiler can raise any
            found[variant] = Judgement(f"{type(error).__name__}: {error}"[:200])
            if variant == own:
                # Without the framework's own layers nothing can be judged or compared.
                failed = Judgement(f"not compared: {own} failed")
                return found | dict.fromkeys(others, failed)
            continue
        if variant == own:
            limit = max(_WORST * off, _CHAOS)
        detail = f"gradients are {off:.2g} off, more than {limit:.2g}" if off > limit else ""
        found[variant] = Judgement(detail, off, step.layers, step.fused)
    return found


def take_turns(
    turns: Mapping[Key, Callable[[], Sequence[float]]], rounds: int, limit: float = math.inf
) -> dict[Key, list[float]]:
    """Time several calls in turns, so that other load on the machine slows all of them alike.

    Parameters
    ----------
    turns : mapping
        Functions that make a turn and return its samples, in seconds a call.
    rounds : int
        Turns of each function.
    limit : float
        Seconds of turns after which a function gets no further turn.

    Returns
    -------
    dict
        The samples of all turns of each function.
    """
    samples: dict[Key, list[float]] = {key: [] for key in turns}
    spent = dict.fromkeys(turns, 0.0)
    for number in range(rounds):
        for key in order(list(turns), number):
            if samples[key] and spent[key] >= limit:
                continue
            begin = time.perf_counter()
            samples[key] += turns[key]()
            spent[key] += time.perf_counter() - begin
    return samples


def order(keys: Sequence[Key], number: int) -> list[Key]:
    """Return the order of round `number`.

    Each round begins with another key, and every other round is reversed, so no key always follows
    the same key.
    """
    start = number % max(1, len(keys))
    step = -1 if number % 2 else 1
    return [keys[(start + step * i) % len(keys)] for i in range(len(keys))]


def _distance(found: Iterable[np.ndarray], exact: Iterable[np.ndarray]) -> float:
    """Return the distance of gradients from the exact ones, relative to the exact length."""
    pairs = [(np.asarray(one, np.float64), other) for one, other in zip(found, exact, strict=True)]
    off = sum(float(np.square(one - other).sum()) for one, other in pairs)
    length = sum(float(np.square(other).sum()) for _, other in pairs)
    return float(np.sqrt(off / length))
