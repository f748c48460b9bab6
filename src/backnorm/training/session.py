"""The training itself, in the process of its framework: two networks, step by step in turns."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backnorm.training.digits import Digits, batches, steps
from backnorm.training.frameworks import LAYERS, Framework, Layer, Trainer
from backnorm.training.model import (
    Epoch,
    FirstStep,
    GradientDifference,
    Normalised,
    Settings,
)
from backnorm.training.network import initial_weights, sites
from benchmarks.turns import order

__all__ = ["Moment", "compare_first_step", "train"]

# Seconds between signs of life: each costs the other process some time of a processor.
_PAUSE = 0.25

# Samples of the layers alone that a whole training takes, at least.
_SAMPLES = 24


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a training is, for whoever watches.

    Attributes
    ----------
    seed, epoch, step : int
        From 0.
    done : float
        Share of all steps.
    losses, accuracies, rates : dict
        Of the last step, of the epoch so far, and images a second; by layer.
    """

    seed: int
    epoch: int
    step: int
    done: float
    losses: dict[Layer, float]
    accuracies: dict[Layer, float]
    rates: dict[Layer, float]


@dataclass(slots=True)
class _Tally:
    """An epoch of one network as it goes."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    right: int = 0


def train(
    framework: Framework, settings: Settings, digits: Digits, tell: Callable[[object], None]
) -> None:
    """Train both networks for every seed, and compare and time their layers.

    Tells a `FirstStep`, then `Moment` now and then, and after every epoch an `Epoch` of each
    network and some `Normalised`.
    """
    images, labels = next(batches(digits, settings.batch, 0, 0))
    tell(compare_first_step(framework, settings, images, labels))
    _warm_up(framework, settings, digits)
    rounds = _Rounds(framework, settings)
    for seed in range(settings.seeds):
        weights = initial_weights(seed)
        trainers = {layer: framework.build(layer, weights, settings.dtype) for layer in LAYERS}
        for epoch in range(settings.epochs):
            gc.collect()
            for found in _epoch(trainers, settings, digits, seed, epoch, tell):
                tell(found)
            for taken in rounds.take():
                tell(taken)


def compare_first_step(
    framework: Framework, settings: Settings, images: np.ndarray, labels: np.ndarray
) -> FirstStep:
    """Return loss and gradients of a batch with both layers, and in float64."""
    weights = initial_weights(0)
    losses, gradients = {}, {}
    for name, layer, dtype in (
        ("own", LAYERS[0], settings.dtype),
        ("backnorm", LAYERS[1], settings.dtype),
        ("exact", LAYERS[0], "float64"),
    ):
        trainer = framework.build(layer, weights, dtype)
        losses[name], gradients[name] = trainer.gradients(images, labels)

    def apart(name: str, one: str, other: str) -> float:
        difference = float(np.abs(gradients[one][name] - gradients[other][name]).max())
        largest = float(np.abs(gradients["exact"][name]).max())
        if difference == 0:
            return 0.0
        return difference / largest if largest else math.inf

    return FirstStep(
        losses,
        tuple(
            GradientDifference(
                name,
                apart(name, "own", "backnorm"),
                apart(name, "own", "exact"),
                apart(name, "backnorm", "exact"),
            )
            for name in weights
        ),
    )


def _warm_up(framework: Framework, settings: Settings, digits: Digits) -> None:
    """Let everything be compiled that steps need: what a first step costs is no step's time."""
    images, labels = next(batches(digits, settings.batch, 0, 0))
    for layer in LAYERS:
        trainer = framework.build(layer, initial_weights(0), settings.dtype)
        for _ in range(2):
            trainer.step(images, labels, 0.0)
        trainer.evaluate(digits.test_images, digits.test_labels)


def _epoch(
    trainers: dict[Layer, Trainer],
    settings: Settings,
    digits: Digits,
    seed: int,
    number: int,
    tell: Callable[[object], None],
) -> Iterator[Epoch]:
    tallies = {layer: _Tally() for layer in LAYERS}
    each = steps(digits, settings.batch)
    total, told = settings.epochs * each, time.monotonic()
    for step, (images, labels) in enumerate(batches(digits, settings.batch, seed, number)):
        at = number * each + step
        rate = settings.rate * (1 + math.cos(math.pi * at / total)) / 2
        for layer in order(LAYERS, step):
            tally = tallies[layer]
            begin = time.perf_counter()
            loss, right = trainers[layer].step(images, labels, rate)
            tally.seconds.append(time.perf_counter() - begin)
            tally.losses.append(loss)
            tally.right += right
        if time.monotonic() - told > _PAUSE:
            told = time.monotonic()
            done = (seed * total + at + 1) / (total * settings.seeds)
            tell(_moment(tallies, settings, (seed, number, step), done))
    for layer, tally in tallies.items():
        right = trainers[layer].evaluate(digits.test_images, digits.test_labels)
        yield Epoch(
            seed,
            number,
            layer,
            tuple(tally.losses),
            tuple(tally.seconds),
            tally.right / (each * settings.batch),
            right / len(digits.test_labels),
        )


def _moment(
    tallies: dict[Layer, _Tally], settings: Settings, place: tuple[int, int, int], done: float
) -> Moment:
    batch = settings.batch
    return Moment(
        *place,
        done,
        {layer: tally.losses[-1] for layer, tally in tallies.items()},
        {layer: t.right / (len(t.losses) * batch) for layer, t in tallies.items()},
        {layer: batch * len(t.seconds) / sum(t.seconds) for layer, t in tallies.items()},
    )


class _Rounds:
    """The layers alone, in turns, some rounds after every epoch: as spread out as the steps."""

    def __init__(self, framework: Framework, settings: Settings) -> None:
        places = sites(settings.batch)
        self._calls: dict[Layer, Any] = {
            layer: framework.normalise(layer, places, settings.dtype) for layer in LAYERS
        }
        self._rounds = math.ceil(_SAMPLES / (settings.epochs * settings.seeds))
        self._taken = 0

    def take(self) -> Iterator[Normalised]:
        for _ in range(self._rounds):
            for layer in order(LAYERS, self._taken):
                # The first run does not count: the other's threads may still be awake.
                self._calls[layer]()
                yield Normalised(layer, tuple(self._calls[layer]()))
            self._taken += 1
