"""Made-up results: what a training and a timing of wide steps could find."""

from __future__ import annotations

import numpy as np

from backnorm.training.frameworks import LAYERS
from backnorm.training.model import (
    Epoch,
    FirstStep,
    GradientDifference,
    Normalised,
    Settings,
    TrainingResult,
)
from backnorm.training.network import initial_weights, sites
from backnorm.training.wide_model import (
    MEMORY_FORMATS,
    WideCheck,
    WideResult,
    WideSettings,
    WideStep,
)
from benchmarks.model import Environment

STAGES = ("stem", "layer1", "layer2", "layer3", "layer4")


def environment():
    return Environment(
        cpu="a processor <made up> & not measured",
        system="Linux",
        python="3.13.0",
        processors=2,
        threads=2,
        cache_per_core=2**20,
        cache_shared=2**25,
        versions={"backnorm": "0.1", "torch": "2.13"},
        date="2026-01-02T03:04:05+00:00",
    )


def epoch(seed, number, layer, *, steps=4, test_accuracy=None):
    rng = np.random.default_rng((seed, number))
    noise = 1e-7 if layer == "own" else 0.0
    losses = 2.0 * 0.7 ** (steps * number + np.arange(steps)) * (1 + noise)
    seconds = rng.uniform(5e-3, 6e-3, steps) * (1.0 if layer == "own" else 0.8)
    accuracy = 0.9 + 0.01 * number if test_accuracy is None else test_accuracy
    return Epoch(seed, number, layer, tuple(losses), tuple(seconds), accuracy, accuracy)


def first_step(**changes):
    names = list(initial_weights(0))
    gradients = tuple(
        GradientDifference(name, 1e-7 * (i + 1), 2e-7 * (i + 1), 1.5e-7 * (i + 1))
        for i, name in enumerate(names)
    )
    losses = {"own": 2.5, "backnorm": 2.5 * (1 + 2e-7), "exact": 2.5}
    return FirstStep(**{"losses": losses, "gradients": gradients} | changes)


def training(*, seeds=3, epochs=4, framework="torch", dtype="float32"):
    settings = Settings(framework, dtype, epochs, seeds, 64, 2)
    places = sites(64)
    result = TrainingResult(
        environment(), settings, tuple((site.name, site.shape) for site in places), first_step()
    )
    for seed in range(seeds):
        for number in range(epochs):
            for layer in LAYERS:
                result.add(epoch(seed, number, layer))
                factor = 1e-4 if layer == "own" else 5e-5
                result.add(Normalised(layer, tuple(factor * (1 + i) for i in range(len(places)))))
    return result


def wide(*, rounds=2):
    result = WideResult(environment(), WideSettings("torch", "float32", 16, 224, rounds, 2))
    for memory in MEMORY_FORMATS:
        result.add(WideCheck(memory, 6.9, 6.9 * (1 + 1e-6), 1e-3))
        for number in range(rounds):
            for layer in LAYERS:
                scale = (1.0 if layer == "own" else 0.5) * (1 + 0.01 * number)
                passes = {stage: scale * 0.05 * (i + 1) for i, stage in enumerate(STAGES)}
                whole = 4.0 + sum(passes.values()) * 3
                twice = {stage: 2 * seconds for stage, seconds in passes.items()}
                result.add(WideStep(memory, layer, whole, passes, twice))
    return result
