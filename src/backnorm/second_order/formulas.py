"""Formulas of the second order (the gradients of the backward pass), for arrays of any framework.

L is the sum of all elements of dx, dgamma and dbeta, each multiplied by its cotangent (an element
of ddx, ddgamma or ddbeta). A channel has M elements. c is x - mean, and s is 1/sqrt(variance +
epsilon). ddx, ddgamma and ddbeta are the cotangents. The sums of a channel are D = sum(dy), Q =
s*sum(dy*c), I = sum(ddx), P = s*sum(ddx*c) and R = sum(ddx*dy). Then::

    L = gamma*s*(R - I*D/M - P*Q/M) + ddgamma*Q + ddbeta*D       training
    L = gamma*s*R                   + ddgamma*Q + ddbeta*D       frozen statistics

The second-order gradients are the derivatives of L. One formula serves both cases. With frozen
statistics, the code passes the object `ABSENT` (a missing array) for 1/M. A product with `ABSENT`
is `ABSENT`, and a term that is `ABSENT` adds nothing. Per-channel arrays have a shape that
broadcasts with the elements. The third-order gradients come from automatic differentiation of these
formulas.

s can be as large as 4e161 (for the smallest variance), so that s*s overflows. Therefore no
per-channel factor contains s*s. Instead, x - mean is multiplied by one s, and the gradient is
multiplied by the other s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

# An array of any framework, with one number per element or one per channel; or ABSENT.
Array = Any

#: A function that takes arrays left and right, and a pivot per channel. It returns, for each
#: channel, sum(right) and sum(right * (left - pivot)).
Reduce = Callable[[Array, Array, Array], tuple[Array, Array]]


class _Absent:
    """A missing array. Adding it to an array changes nothing. If it is multiplied by an array, the
    product is again a missing array. So a NaN in that array has no effect (0 * NaN would be NaN).
    """

    # If this attribute is None, NumPy's operators defer to the operators of this class.
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
    """The given per-channel arrays. ddgamma and ddbeta may be ABSENT; gamma may be the number 1."""

    mean: Array
    s: Array
    gamma: Array
    ddgamma: Array
    ddbeta: Array


class Factors(NamedTuple):
    """The per-channel values from which elements of the second-order gradients are computed."""

    # D/M and I/M.
    mean_dy: Array
    mean_ddx: Array
    # gamma*s, the factor of every element of dx in the backward pass.
    scale: Array
    s: Array
    # of_dy is dL/dQ, and of_ddx is dL/dP, with L, Q and P as in the module's docstring. In the
    # gradient with respect to x, dy is multiplied by s*of_dy, and ddx by s*of_ddx. In the gradient
    # with respect to dy, s*c is multiplied by of_dy.
    of_dy: Array
    of_ddx: Array
    # In the gradient of x, one term comes from the variance: s*of_h times s*c, where c is x - mean.
    of_h: Array
    ddbeta: Array
    # The derivatives of L with respect to gamma, the mean and the variance. The derivatives with
    # respect to mean and variance are used only if mean and variance are arguments of the call, not
    # functions of x.
    gamma: Array
    mean: Array
    variance: Array


def factors(
    reduce: Reduce,
    x: Array,
    dy: Array,
    ddx: Array,
    values: Channels,
    *,
    share: Any,
    alone: bool = False,
) -> Factors:
    """Return the per-channel factors of the derivatives of L (defined at the top of the module).

    Parameters
    ----------
    reduce : callable
        Computes sums.
    x, dy, ddx : array
        The elements; ddx may be ABSENT.
    values : Channels
    share : float
        1/M; ABSENT with frozen statistics.
    alone : bool
        Whether mean and variance are arguments whose gradients are needed, not functions of x or
        constants.
    """
    mean, s, gamma, ddgamma, ddbeta = values
    d = q = i = p = covariance = ABSENT
    training = share is not ABSENT
    if training or alone:
        d, q = reduce(x, dy, mean)
        q = s * q
    if ddx is not ABSENT:
        if training:
            i, p = reduce(x, ddx, mean)
            p = s * p
        # `covariance` is R - I*D/M, where R = sum(ddx*dy), I = sum(ddx) and D = sum(dy). It is
        # computed as a single sum, that of ddx * (dy - D/M). If R and I*D/M were computed
        # separately, they could both be large, and their difference would lose digits.
        _, covariance = reduce(dy, ddx, d * share)
    scale = gamma * s
    of_dy = ddgamma + scale * -(p * share)
    of_ddx = scale * -(q * share)
    # `by_s` is -s*dL/ds. The derivative of s = (variance + epsilon)**(-1/2) with respect to the
    # variance is -s**3/2. So dL/dvariance through s is s**2/2 * by_s.
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
    """Return dL/dx for every element, if mean and variance are computed from x, or are frozen.

    h is s*c, d is dy - D/M and e is ddx - I/M. The top of this module defines s, c, D, I, M and L.
    """
    return k.s * (k.of_dy * d + k.of_ddx * e + k.of_h * h)


def by_x_alone(k: Factors, dy: Array, ddx: Array) -> Array:
    """Return dL/dx of elements if mean and variance are arguments that do not depend on x."""
    return k.s * (k.of_dy * dy + k.of_ddx * ddx)
