"""The second order as formulas, for the arrays of any framework.

With c = x - mean, s = 1/sqrt(variance + epsilon), M elements per channel, and the sums of a channel
D = sum(dy), Q = s*sum(dy*c), I = sum(ddx), P = s*sum(ddx*c) and R = sum(ddx*dy), the results of the
backward pass weighted by their cotangents come to ::

    L = gamma*s*(R - I*D/M - P*Q/M) + ddgamma*Q + ddbeta*D       training
    L = gamma*s*R                   + ddgamma*Q + ddbeta*D       frozen statistics

What is sought are the derivatives of L. Both are one formula here: with frozen statistics 1/M is
absent. Per-channel arrays have a shape that broadcasts against the elements. Everything is
differentiable, so that an automatic differentiation of these formulas gives the third order.

s is up to 4e161 (of the smallest variance there is), so that a product of two is no number. No
factor has two: elements are multiplied by the second one, and x - mean by s before anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["ABSENT", "Channels", "Factors", "Reduce", "by_dy", "by_x", "by_x_alone", "factors"]

# An array of elements or of channels, of any framework, or ABSENT.
Array = Any

#: From left, right and a pivot per channel: sum(right) and sum(right * (left - pivot)).
Reduce = Callable[[Array, Array, Array], tuple[Array, Array]]


class _Absent:
    """What was not given: a zero that adds no term, so that no NaN spreads through it."""

    # NumPy leaves operators to this class.
    __array_ufunc__ = None

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __rsub__ = __add__

    def __sub__(self, other: Any) -> Any:
        return -other

    def __mul__(self, other: Any) -> _Absent:
        return self

    __rmul__ = __mul__
    __getitem__ = __mul__

    def __neg__(self) -> _Absent:
        return self


ABSENT: Any = _Absent()


class Channels(NamedTuple):
    """What is given for each channel; a cotangent may be ABSENT, gamma may be the number 1."""

    mean: Array
    s: Array
    gamma: Array
    ddgamma: Array
    ddbeta: Array


class Factors(NamedTuple):
    """What is computed for each channel before its elements."""

    # D/M and I/M.
    mean_dy: Array
    mean_ddx: Array
    # gamma*s, by which the backward pass multiplies its elements.
    scale: Array
    s: Array
    # dL/dQ and dL/dP: s times them are the factors of dy and ddx in the gradient of x, and the
    # former is that of s*c in the gradient of dy.
    of_dy: Array
    of_ddx: Array
    # s times it is the factor of s*c in the gradient of x, which comes from the variance.
    of_h: Array
    ddbeta: Array
    # Gradients of per-channel arrays; those of mean and variance where they are arguments like x.
    gamma: Array
    mean: Array
    variance: Array


def factors(
    reduce: Reduce,
    x: Array,
    dy: Array,
    ddx: Array,
    given: Channels,
    *,
    share: Any,
    alone: bool = False,
) -> Factors:
    """Return the derivatives of L by what is the same for a channel.

    Parameters
    ----------
    reduce : callable
        How sums are computed.
    x, dy, ddx : array
        The elements; ddx may be ABSENT.
    given : Channels
    share : float
        1/M; ABSENT with frozen statistics.
    alone : bool
        Whether mean and variance are arguments like x, by which derivatives are wanted, rather
        than functions of x or constants.
    """
    mean, s, gamma, ddgamma, ddbeta = given
    d = q = i = p = covariance = ABSENT
    training = share is not ABSENT
    if training or alone:
        d, q = reduce(x, dy, mean)
        q = s * q
    if ddx is not ABSENT:
        if training:
            i, p = reduce(x, ddx, mean)
            p = s * p
        # R - I*D/M as one sum, in which nothing large cancels.
        _, covariance = reduce(dy, ddx, d * share)
    scale = gamma * s
    of_dy = ddgamma + scale * -(p * share)
    of_ddx = scale * -(q * share)
    # -s*dL/ds. The derivative of s = (variance + epsilon)**(-1/2) is -s**3/2.
    by_s = -(scale * (covariance + 3.0 * p * q * -share) + ddgamma * q)
    return Factors(
        mean_dy=d * share,
        mean_ddx=i * share,
        scale=scale,
        s=s,
        of_dy=of_dy,
        of_ddx=of_ddx,
        of_h=by_s * share,
        ddbeta=ddbeta,
        gamma=s * (covariance + p * q * -share),
        mean=s * -(of_dy * d + of_ddx * i),
        variance=s * (0.5 * s * by_s),
    )


def by_dy(k: Factors, h: Array, e: Array) -> Array:
    """Return dL/d(dy) of elements, from h = s*c and e = ddx - I/M."""
    return k.scale * e + k.of_dy * h + k.ddbeta


def by_x(k: Factors, h: Array, d: Array, e: Array) -> Array:
    """Return dL/dx of elements, where the statistics are functions of x, or constants.

    From h = s*c, d = dy - D/M and e = ddx - I/M.
    """
    return k.s * (k.of_dy * d + k.of_ddx * e + k.of_h * h)


def by_x_alone(k: Factors, dy: Array, ddx: Array) -> Array:
    """Return dL/dx of elements, where the statistics are arguments of their own."""
    return k.s * (k.of_dy * dy + k.of_ddx * ddx)
