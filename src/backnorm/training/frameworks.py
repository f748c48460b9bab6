"""What a framework has to do here, and where each one's module is.

A framework's module is imported in a process of its own only (`worker`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from backnorm.training.network import Site

__all__ = [
    "DTYPES",
    "FRAMEWORKS",
    "LAYERS",
    "LOSS_SCALE",
    "DType",
    "Framework",
    "Layer",
    "Trainer",
    "load",
]

#: Whose batch-normalisation layers a network has: the framework's own, or ours.
Layer = Literal["own", "backnorm"]
LAYERS: tuple[Layer, Layer] = ("own", "backnorm")

#: The type of images and activations. Parameters, their gradients, statistics and the loss are
#: float32, and float64 with float64.
DType = Literal["float32", "bfloat16", "float16", "float64"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16", "float64")

#: What the loss is multiplied by before the backward pass, and gradients are divided by after it:
#: most gradients of activations are below the normal numbers of float16 otherwise.
LOSS_SCALE = {"float16": 1024.0}

#: Name to module and class.
FRAMEWORKS = {
    "torch": "backnorm.training.pytorch:PyTorch",
    "jax": "backnorm.training.jax:Jax",
    "tensorflow": "backnorm.training.tensorflow:TensorFlow",
}


class Trainer(Protocol):
    """A network that learns by stochastic gradient descent with momentum `MOMENTUM`.

    Images are float32 (N, 8, 8), labels int64 (N,). Every call is done when it returns.
    """

    def step(self, images: np.ndarray, labels: np.ndarray, rate: float) -> tuple[float, int]:
        """Learn from a batch; return its loss before and how many of its images were right."""

    def gradients(
        self, images: np.ndarray, labels: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        """Return the loss of a batch and its gradient by every parameter, float64.

        Parameters stay as they are (running statistics need not). Names and shapes are those of
        `network.initial_weights`.
        """

    def evaluate(self, images: np.ndarray, labels: np.ndarray) -> int:
        """Return how many images are right with running statistics."""


class Framework(Protocol):
    """One framework; made once in the process, by its module's class."""

    def start(self, threads: int) -> dict[str, str]:
        """Import the framework, limit it to `threads` threads, and return versions by package.

        Raises
        ------
        benchmarks.peers.base.Missing
            If it is not installed.
        """

    def build(self, layer: Layer, weights: Mapping[str, np.ndarray], dtype: DType) -> Trainer:
        """Return a network of `network.convolutions` that begins with `weights`.

        It takes the place of the last one of the same layer and type, which must not be used any
        more: what has been compiled for that one serves this one.
        """

    def normalise(
        self, layer: Layer, sites: Sequence[Site], dtype: DType
    ) -> Callable[[], list[float]]:
        """Return a call that runs the layers alone, on made-up activations of a step's shapes.

        It returns the seconds of a forward and a backward pass at each site, with what a step
        pays for them and no more: the cost of a call where each layer is called, and none where a
        step is compiled as one.
        """


def load(name: str) -> Framework:
    """Return the framework of a name in `FRAMEWORKS`; imports its module."""
    module, _, kind = FRAMEWORKS[name].partition(":")
    made: Framework = getattr(importlib.import_module(module), kind)()
    return made
