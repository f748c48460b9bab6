"""The values that operators return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "Blend",
    "ChannelSums",
    "Gradients",
    "GradientsWithResidual",
    "Normalized",
    "NormalizedWithMask",
    "SecondGradients",
]


class Gradients(NamedTuple):
    """Gradients of batch normalisation: dx, of x's shape and type; dgamma and dbeta, (C,)."""

    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray


class Blend(NamedTuple):
    """How a result is blended into what its output holds: alpha * result + beta * held.

    Attributes
    ----------
    data, channels : (float, float)
        alpha and beta of dx, and of dgamma and dbeta. With beta = 0 what is held is not read.
    """

    data: tuple[float, float] = (1.0, 0.0)
    channels: tuple[float, float] = (1.0, 0.0)


class SecondGradients(NamedTuple):
    """Gradients of the backward pass: with respect to x and dy, of x's shape; to gamma, (C,)."""

    x: np.ndarray
    dy: np.ndarray
    gamma: np.ndarray


class Normalized(NamedTuple):
    """Result of the training forward: y, and the batch mean and biased variance, (C,) each."""

    y: np.ndarray
    mean: np.ndarray
    variance: np.ndarray


class NormalizedWithMask(NamedTuple):
    """Result of the training forward with a ReLU: as `Normalized`, and the mask.

    Bit i % 8 of byte i // 8 of the mask (uint8) says whether element i of y, in the order of
    memory, is more than zero. A few bytes at the end are padding.
    """

    y: np.ndarray
    mean: np.ndarray
    variance: np.ndarray
    mask: np.ndarray


class GradientsWithResidual(NamedTuple):
    """Gradients through a ReLU and the sum before it: as `Gradients`, and the residual's."""

    dx: np.ndarray
    dgamma: np.ndarray
    dbeta: np.ndarray
    dresidual: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class ChannelSums:
    """The two sums of the backward pass, per channel; what is exchanged between phases.

    Two of them add up (``a + b``): over threads, micro-batches, chunks of a file or machines.
    The empty sum is ``ChannelSums.zero(channels)``.

    Attributes
    ----------
    sum_dy : numpy.ndarray
        float64, shape (C,): sum of dy.
    sum_dy_xmu : numpy.ndarray
        float64, shape (C,): sum of dy * (x - mean).
    count : int
        Number of elements per channel that were summed, M.
    """

    sum_dy: np.ndarray
    sum_dy_xmu: np.ndarray
    count: int

    @classmethod
    def zero(cls, channels: int) -> ChannelSums:
        """Return the sums over no elements, for `channels` channels."""
        return cls(np.zeros(channels), np.zeros(channels), 0)

    def __add__(self, other: object) -> ChannelSums:
        """Return the sums over both sets of elements."""
        if not isinstance(other, ChannelSums):
            return NotImplemented
        if self.sum_dy.shape != other.sum_dy.shape:
            raise ArgumentValueError(
                "sums",
                "only sums over the same channels add up",
                came=f"{self.sum_dy.shape[0]} and {other.sum_dy.shape[0]} channels",
            )
        return ChannelSums(
            self.sum_dy + other.sum_dy,
            self.sum_dy_xmu + other.sum_dy_xmu,
            self.count + other.count,
        )


def check_sums(sums: object, name: str = "sums") -> ChannelSums:
    """Return `sums` if it is a ChannelSums, else raise."""
    if isinstance(sums, ChannelSums):
        return sums
    raise ArgumentTypeError(
        name,
        "must be the ChannelSums that backnorm.reduce returned (or a sum of several)",
        came=type(sums).__name__,
        accepted="ChannelSums",
    )
