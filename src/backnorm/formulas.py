"""Batch normalisation and its gradients as formulas, for the arrays of any framework.

The formulas run where no kernel can be called: on devices without kernels, in graphs that a
compiler splits over devices or compiles as a whole, and where a framework differentiates the
formulas itself. An adapter implements `Namespace` for its framework. Per-channel arrays have the
shape and type that `Namespace.sum` returns. `centred` is x - mean, and `s` is 1/sqrt(variance +
epsilon).
"""

from __future__ import annotations

from typing import Any, Protocol

# An array of any framework. An argument with the name `elements` has x's shape. An argument with
# the name `channels` has one value per channel.
Array = Any


class Namespace(Protocol):
    """Operations of a framework on arrays that have the same shape and channel axis."""

    @property
    def count(self) -> Any:
        """The number of elements of a channel, or 1 for an empty batch."""

    def sum(self, elements: Array) -> Array:
        """Return the sum of each channel."""

    def spread(self, channels: Array, elements: Array) -> Array:
        """Return `channels` in the type of `elements`, in a shape that broadcasts with them."""

    def scaled(self, elements: Array, s: Array, gamma: Array) -> Array:
        """Return elements * s * gamma; if gamma is None, return elements * s."""

    def rounded(self, channels: Array, elements: Array) -> Array:
        """Return a per-channel array with its values rounded to the type of elements."""

    def at_least(self, channels: Array, bound: Any) -> Array:
        """Return the larger of each value of `channels` and `bound`; NaN stays NaN."""


def statistics(xp: Namespace, x: Array) -> tuple[Array, Array]:
    """Return the mean and the biased variance of every channel, both 0 for an empty batch.

    A sum of many numbers of one sign loses digits. If an approximate mean is first subtracted from
    each number, the sum of these differences loses hardly any digits. So the mean of the deviations
    is added to the approximate mean, as a correction. The pass that sums the squared deviations
    also computes this correction.
    """
    first = xp.rounded(xp.sum(x) / xp.count, x)
    centred = x - xp.spread(first, x)
    correction = xp.sum(centred) / xp.count
    variance = xp.sum(centred * centred) / xp.count - correction * correction
    # Rounding can make the variance negative; a negative variance is replaced by 0.
    return first + correction, xp.at_least(variance, 0)


def normalized(xp: Namespace, centred: Array, s: Array, gamma: Array, beta: Array) -> Array:
    """Return y = gamma * s * (x - mean) + beta.

    If gamma is None, it counts as 1. If beta is None, it counts as 0.
    """
    y = xp.scaled(centred, s, gamma)
    return y if beta is None else y + xp.spread(beta, y)


def gradients(
    xp: Namespace, centred: Array, dy: Array, s: Array, gamma: Array, training: bool
) -> tuple[Array, Array, Array]:
    """Return dx, dgamma and dbeta (`backnorm.batch_norm_backward` has the formulas)."""
    sum_dy, sum_dy_xmu = xp.sum(dy), xp.sum(dy * centred)
    dx = dy
    if training:
        # s * s can overflow, so x - mean is multiplied by s first.
        normalised, slope = centred * xp.spread(s, centred), s * (sum_dy_xmu / xp.count)
        dx = dx - xp.spread(sum_dy / xp.count, dx) - normalised * xp.spread(slope, dx)
    return xp.scaled(dx, s, gamma), s * sum_dy_xmu, sum_dy
