"""The network that learns digits: layers, initial weights, and what each normalisation gets.

Frameworks build it from this description, so all begin with the same numbers. Parameters have the
names of their layers and, in this module's words, the shapes (height, width, inputs, outputs) for
convolutions, (channels,) for normalisation and (inputs, outputs) for the last layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = [
    "BLOCKS",
    "CLASSES",
    "EPSILON",
    "MOMENTUM",
    "SIDE",
    "STEM",
    "WIDTH",
    "Block",
    "Convolution",
    "Site",
    "convolutions",
    "initial_weights",
    "sites",
]

# Images are SIDE x SIDE.
SIDE = 8
CLASSES = 10

#: Of every batch normalisation.
EPSILON = 1e-5

#: The share of running statistics that a step keeps.
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution without bias, followed by a batch normalisation.

    The convolution's weight is `name`.weight, the normalisation's are `name`.gamma and
    `name`.beta. Images are padded by size // 2 on each side.

    Attributes
    ----------
    name : str
    inputs, outputs : int
        Channels.
    size, stride : int
    side : int
        Of the images that come out.
    """

    name: str
    inputs: int
    outputs: int
    size: int
    stride: int
    side: int


@dataclass(frozen=True, slots=True)
class Block:
    """Two convolutions and a shortcut: relu(second(relu(first(x))) + shortcut(x)).

    `shortcut` is None where x itself is added.
    """

    first: Convolution
    second: Convolution
    shortcut: Convolution | None


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a network where a batch is normalised.

    Attributes
    ----------
    name : str
    shape : tuple of int
        N, C, H, W, whatever the order in memory.
    """

    name: str
    shape: tuple[int, int, int, int]


STEM = Convolution("stem", 1, 16, 3, 1, SIDE)

#: Channels at the end.
WIDTH = 64


def _blocks() -> Iterator[Block]:
    inputs, side = STEM.outputs, STEM.side
    for number, (outputs, stride) in enumerate(((16, 1), (32, 2), (WIDTH, 2)), 1):
        side //= stride
        name = f"block{number}"
        changes = stride > 1 or inputs != outputs
        yield Block(
            Convolution(f"{name}.first", inputs, outputs, 3, stride, side),
            Convolution(f"{name}.second", outputs, outputs, 3, 1, side),
            Convolution(f"{name}.shortcut", inputs, outputs, 1, stride, side) if changes else None,
        )
        inputs = outputs


BLOCKS = tuple(_blocks())


def convolutions() -> list[Convolution]:
    """Return all convolutions in the order in which they run."""
    inside = [c for block in BLOCKS for c in (block.first, block.second, block.shortcut) if c]
    return [STEM, *inside]


def sites(batch: int) -> list[Site]:
    """Return what is normalised in a step, in order."""
    return [Site(c.name, (batch, c.outputs, c.side, c.side)) for c in convolutions()]


def initial_weights(seed: int) -> dict[str, np.ndarray]:
    """Return all parameters in order, float64.

    Convolutions are normal with variance 2 / (inputs * size**2). gamma and beta are normal about
    1 and 0 with deviation 0.1, not 1 and 0 exactly: an error in either would not show otherwise.
    """
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    for c in convolutions():
        shape = (c.size, c.size, c.inputs, c.outputs)
        deviation = math.sqrt(2 / (c.inputs * c.size**2))
        weights[f"{c.name}.weight"] = rng.normal(0, deviation, shape)
        weights[f"{c.name}.gamma"] = rng.normal(1, 0.1, c.outputs)
        weights[f"{c.name}.beta"] = rng.normal(0, 0.1, c.outputs)
    weights["head.weight"] = rng.normal(0, math.sqrt(1 / WIDTH), (WIDTH, CLASSES))
    weights["head.bias"] = np.zeros(CLASSES)
    # What float32 cannot hold would be lost to it: all types begin with the same numbers.
    return {name: w.astype(np.float32).astype(np.float64) for name, w in weights.items()}
