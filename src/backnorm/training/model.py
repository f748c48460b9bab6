"""What a training finds: plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, median

import numpy as np

from backnorm.training.frameworks import LAYERS, DType, Layer
from benchmarks.model import Environment, Timing
from benchmarks.turns import summary

__all__ = [
    "Epoch",
    "FirstStep",
    "GradientDifference",
    "Normalised",
    "Settings",
    "TrainingResult",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What to train and how.

    Attributes
    ----------
    framework : str
        A name of `frameworks.FRAMEWORKS`.
    dtype : str
    epochs, seeds, batch, threads : int
    rate : float
        The learning rate at the beginning; it falls to 0 along half a wave of a cosine.
    """

    framework: str
    dtype: DType
    epochs: int
    seeds: int
    batch: int
    threads: int
    rate: float = 0.1


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """How far a parameter's gradients at the first step are apart.

    Each is the largest difference of any element over the largest element of the exact gradient:
    the gradient of the same network with the framework's own layers, in float64.

    Attributes
    ----------
    name : str
        Of the parameter.
    between : float
        Of the framework's layers and ours.
    own, backnorm : float
        Of either and the exact one.
    """

    name: str
    between: float
    own: float
    backnorm: float


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first batch of the first seed, with identical weights.

    Attributes
    ----------
    losses : dict of str to float
        "own", "backnorm" and "exact".
    gradients : tuple of GradientDifference
    """

    losses: dict[str, float]
    gradients: tuple[GradientDifference, ...]

    def loss_difference(self) -> float:
        """Return the difference of the losses over the framework's."""
        own, ours = self.losses["own"], self.losses["backnorm"]
        return abs(own - ours) / abs(own)

    def worst(self) -> GradientDifference:
        """Return the parameter whose gradients are the farthest apart."""
        return max(self.gradients, key=lambda g: g.between)

    def failures(self, dtype: DType) -> list[str]:
        """Return a line for each gradient of ours that is too far from the exact one.

        What the rest of the network rounds is the same for both layers and has its bounds nowhere,
        so the framework's own layers are the measure: four times their worst difference, and 256
        units of the parameters' type where they are exact themselves (in float64).
        """
        unit = np.finfo(np.float64 if dtype == "float64" else np.float32).eps
        allowed = 4 * max(g.own for g in self.gradients) + 256 * unit
        return [
            f"the gradient of {g.name} is {g.backnorm:.1e} from the exact one, "
            f"of its largest element; allowed: {allowed:.1e}"
            for g in self.gradients
            # So that NaN fails.
            if not g.backnorm <= allowed
        ]


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch of one network.

    Attributes
    ----------
    seed, number : int
        From 0.
    layer : {"own", "backnorm"}
    losses, seconds : tuple of float
        Of each step.
    accuracy : float
        Share of the images that were right when they were learnt from.
    test_accuracy : float
        Share of the test images that are right after the epoch.
    """

    seed: int
    number: int
    layer: Layer
    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    accuracy: float
    test_accuracy: float


@dataclass(frozen=True, slots=True)
class Normalised:
    """One run of the layers alone: seconds of each site, forward and backward together."""

    layer: Layer
    seconds: tuple[float, ...]


@dataclass(slots=True)
class TrainingResult:
    """What has been found so far; `sites` are name and shape of what is normalised in a step."""

    environment: Environment
    settings: Settings
    sites: tuple[tuple[str, tuple[int, ...]], ...] = ()
    first: FirstStep | None = None
    epochs: list[Epoch] = field(default_factory=list)
    normalised: list[Normalised] = field(default_factory=list)

    def add(self, value: object) -> bool:
        """Take in what the training tells; return whether it was a finding."""
        if isinstance(value, FirstStep):
            self.first = value
        elif isinstance(value, Epoch):
            self.epochs.append(value)
        elif isinstance(value, Normalised):
            self.normalised.append(value)
        else:
            return False
        return True

    def something(self) -> bool:
        """Return whether there is anything worth keeping."""
        return bool(self.epochs)

    def timed(self) -> bool:
        """Return whether both networks and both layers have been timed."""
        found = {e.layer for e in self.epochs} & {run.layer for run in self.normalised}
        return found == set(LAYERS)

    def failures(self) -> list[str]:
        """Return a line for each parameter whose gradient of ours is not what it has to be."""
        return [] if self.first is None else self.first.failures(self.settings.dtype)

    def runs(self, layer: Layer) -> dict[int, list[Epoch]]:
        """Return the epochs of a layer by seed, in order."""
        runs: dict[int, list[Epoch]] = {}
        for epoch in self.epochs:
            if epoch.layer == layer:
                runs.setdefault(epoch.seed, []).append(epoch)
        return runs

    def finals(self) -> dict[int, dict[Layer, float]]:
        """Return the last test accuracies, by seed; of seeds that came to their end."""
        found: dict[int, dict[Layer, float]] = {}
        for layer in LAYERS:
            for seed, epochs in self.runs(layer).items():
                if len(epochs) == self.settings.epochs:
                    found.setdefault(seed, {})[layer] = epochs[-1].test_accuracy
        return {seed: pair for seed, pair in found.items() if len(pair) == len(LAYERS)}

    def accuracy(self, layer: Layer) -> float:
        """Return the mean of the last test accuracies; NaN before a seed has come to its end."""
        values = [pair[layer] for pair in self.finals().values()]
        return fmean(values) if values else math.nan

    def step_timing(self, layer: Layer) -> Timing:
        """Return the seconds of a step."""
        seconds = [s for epoch in self.epochs if epoch.layer == layer for s in epoch.seconds]
        return summary(seconds)

    def norm_timing(self, layer: Layer) -> Timing:
        """Return the seconds that all sites of a step take, alone."""
        return summary([sum(run.seconds) for run in self.normalised if run.layer == layer])

    def site_seconds(self, layer: Layer) -> list[float]:
        """Return the median of each site."""
        runs = [run.seconds for run in self.normalised if run.layer == layer]
        return [median(values) for values in zip(*runs, strict=True)]
