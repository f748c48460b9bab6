"""The inputs of a call by channel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from backnorm.conformance.data import LayerData, rows_of
from backnorm.dtypes import FLOAT64

Array = np.ndarray

#: The type in which a formula is evaluated as a kernel, so that a kernel without a mistake is right
#: for float64 data, too.
WIDE: Any = np.longdouble


@dataclass(frozen=True, eq=False)
class Channels:
    """The inputs of a call, arranged by channel and converted to a wide type.

    Attributes
    ----------
    x, dy : numpy.ndarray
        Shape (C, M), the elements of a channel in row-major order.
    mean, variance, gamma, beta : numpy.ndarray
        Shape (C,). In the forward pass, `mean` and `variance` are running statistics, because the
        operators of some specifications take these.
    epsilon : float
    images, row : int
        The sizes of the first axis of x, and of its last spatial axis (1 if there is none).
    training : bool
    momentum, unbiased
        As in :class:`LayerData`.
    """

    x: Array
    dy: Array
    mean: Array
    variance: Array
    gamma: Array
    beta: Array
    epsilon: float
    images: int
    row: int
    training: bool
    momentum: float | None
    unbiased: bool

    @classmethod
    def of(
        cls, data: LayerData, *, training: bool = True, scaled: bool = True, wide: bool = False
    ) -> Channels:
        """Return the inputs of a call; if `scaled` is False, gamma is 1 and beta is 0. They are in
        float64, or if `wide` is True in extended precision.
        """
        dtype = WIDE if wide else FLOAT64
        x, dy = (rows_of(tensor, data.channel_axis, dtype) for tensor in (data.x, data.dy))
        mean, variance = data.mean.astype(dtype), data.variance.astype(dtype)
        gamma, beta = np.ones_like(mean), np.zeros_like(mean)
        if scaled:
            gamma, beta = data.gamma.astype(dtype), data.beta.astype(dtype)
        images, *space = data.x.shape[: data.channel_axis] + data.x.shape[data.channel_axis + 1 :]
        row = space[-1] if space else 1
        operands = x, dy, mean, variance, gamma, beta
        averages = data.momentum, data.unbiased
        return cls(*operands, data.epsilon, images, row, training, *averages)

    @property
    def count(self) -> int:
        """Number of elements per channel, M."""
        return int(self.x.shape[1])

    @cached_property
    def of_x(self) -> tuple[Array, Array]:
        """The mean and the biased variance of x."""
        return self.of_first(self.count)

    def of_first(self, count: int) -> tuple[Array, Array]:
        """Return the mean and the biased variance of the first `count` elements of each channel."""
        return _statistics(self.x[:, :count])

    def of_last(self, count: int) -> tuple[Array, Array]:
        """Return those of the last `count` elements."""
        return _statistics(self.x[:, self.count - count :])


def _statistics(x: Array) -> tuple[Array, Array]:
    count = max(x.shape[1], 1)
    with np.errstate(all="ignore"):
        mean = x.sum(1) / count
        return mean, np.square(x - mean[:, None]).sum(1) / count
