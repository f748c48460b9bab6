"""The numbers of the backward pass after its sums, from which the other steps follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from backnorm.conformance.formula._channels import Channels

Array = np.ndarray


def sums_of(channels: Channels, mean: Array, c: Array) -> tuple[Array, Array]:
    """Return sum dy and sum dy*(x - mean)."""
    return channels.dy.sum(1), (channels.dy * c).sum(1)


def dx_of(channels: Channels, c: Array, gain: Array, mean_dy: Array, projection: Array) -> Array:
    """Return the dx of training."""
    dx: Array = gain[:, None] * (channels.dy - mean_dy[:, None] - c * projection[:, None])
    return dx


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """The numbers of the channels after the sums, and the right numbers that follow from these.

    Attributes
    ----------
    channels : Channels
    count : float
        M.
    gamma, s : numpy.ndarray
        gamma, and the inverse deviation.
    sum_dy, sum_dy_xmu : numpy.ndarray
        sum dy, and sum dy*(x - mean).
    """

    channels: Channels
    count: float
    # Arrays; their arithmetic has no more precise type either.
    gamma: Any
    s: Any
    sum_dy: Any
    sum_dy_xmu: Any

    @property
    def gain(self) -> Any:
        """The product gamma*s."""
        return self.gamma * self.s

    @property
    def mean_dy(self) -> Any:
        """The mean sum(dy)/M."""
        return self.sum_dy / self.count

    @property
    def projection(self) -> Any:
        """The product s**2 * sum(dy*(x - mean))/M."""
        return self.s * self.s * self.sum_dy_xmu / self.count

    @property
    def dgamma(self) -> Any:
        """The product s * sum(dy*(x - mean))."""
        return self.s * self.sum_dy_xmu

    @property
    def dbeta(self) -> Any:
        """The sum of dy."""
        return self.sum_dy

    @property
    def centred(self) -> Any:
        """The differences x - mean, with the mean that was passed."""
        return self.channels.x - self.channels.mean[:, None]

    @property
    def dx(self) -> Any:
        """The right dx."""
        rows = self.channels, self.centred, self.gain, self.mean_dy, self.projection
        return dx_of(*rows) if self.channels.training else self.gain[:, None] * self.channels.dy

    def s_of(self, epsilon: float = 0.0, bessel: bool = False) -> Any:
        """The inverse deviation with another epsilon, or with an unbiased variance."""
        variance: Any = self.channels.variance
        if bessel:
            variance = variance * self.count / max(self.count - 1, 1)
        return 1.0 / np.sqrt(variance + epsilon)


Sums = Callable[[Channels, Array, Array], tuple[Array, Array]]


def counting(places: Callable[[Channels], Any], times: float) -> Sums:
    """Return sums in which the elements of a channel at `places` count `times` times, not once."""

    def sums(channels: Channels, mean: Array, c: Array) -> tuple[Array, Array]:
        sum_dy, sum_dy_xmu = sums_of(channels, mean, c)
        at = places(channels)
        dy = channels.dy[:, at]
        more = times - 1.0
        return sum_dy + more * dy.sum(1), sum_dy_xmu + more * (dy * c[:, at]).sum(1)

    return sums


def image_size(channels: Channels) -> int:
    """Return the number of elements of a channel in one image."""
    return channels.count // max(channels.images, 1)


def always(value: Any) -> Callable[[Channels], Any]:
    """Return a step that does not depend on the channels."""
    return lambda channels: value
