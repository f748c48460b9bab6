"""The computations with their derivatives, right to any order, in forward and in reverse mode.

The derivative of the forward pass is the backward pass, in both modes: the Jacobian of y in x is
symmetric. That of the backward pass is a formula, in which mean and variance are arguments like x:
where they are functions of x the forward pass adds what they owe, and the two are the closed form
that others write down. From the third order on JAX differentiates that formula.

No collective stands inside a derivative that is defined here: those of the statistics of several
devices are between them, where JAX differentiates them as it does for any other code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.jax import formulas
from backnorm.jax.deviations import inverse_deviation
from backnorm.jax.differentiable import Arrays, Rule, give_derivative
from backnorm.jax.mapped import alike
from backnorm.jax.primitives import BACKWARD, FORWARD, NORMALIZE, STATISTICS, bind

__all__ = [
    "backward",
    "forward",
    "forward_pulled",
    "forward_pushed",
    "normalize",
    "statistics",
]


def forward(*operands: jax.Array, reproducible: bool = False, **parameters: Any) -> Arrays:
    """Return y, mean and variance from x, gamma and beta."""
    return bind(FORWARD, *operands, reproducible=reproducible, **parameters)


def backward(*operands: jax.Array, reproducible: bool = False, **parameters: Any) -> Arrays:
    """Return dx, dgamma and dbeta from x, dy, mean, variance and gamma."""
    return bind(BACKWARD, *operands, reproducible=reproducible, **parameters)


#: From x, mean, variance, gamma and beta to y, in a tuple.
normalize = partial(bind, NORMALIZE)
#: From x to mean and variance.
statistics = partial(bind, STATISTICS)


def forward_pushed(kept: Arrays, tangents: Arrays, **parameters: Any) -> Arrays:
    """Return the tangents of y, mean and variance; that of y None if it is zero."""
    x, mean, variance, gamma = kept
    dx, dgamma, dbeta = tangents
    dy, dmean, dvariance = None, _zeros_like(mean), _zeros_like(mean)
    if dx is not None:
        dy, sum_dx_h, sum_dx = backward(x, dx, mean, variance, gamma, training=True, **parameters)
        count = formulas.count_of(x, parameters["axis"])
        s = inverse_deviation(variance, parameters["epsilon"])
        dmean, dvariance = sum_dx / count, 2 * (sum_dx_h / count) / s
    return _with_parameters(dy, x, mean, variance, dgamma, dbeta, **parameters), dmean, dvariance


def forward_pulled(kept: Arrays, cotangents: Arrays, **parameters: Any) -> Arrays:
    """Return the cotangents of x, gamma and beta."""
    x, mean, variance, gamma = kept
    dy, dmean, dvariance = cotangents
    dy = _zeros_like(x) if dy is None else dy
    dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, training=True, **parameters)
    # The statistics are seldom differentiated: running averages are not.
    if not (dmean is None and dvariance is None):
        more = _through_statistics(x, mean, dmean, dvariance, parameters["axis"])
        dx = (dx.astype(more.dtype) + more).astype(x.dtype)
    return dx, dgamma, dbeta


give_derivative(
    FORWARD,
    Rule(
        keep=lambda operands, results: (operands[0], *results[1:], operands[1]),
        push=forward_pushed,
        pull=forward_pulled,
        like=(0, 1, 1),
    ),
)


def _backward_pushed(kept: Arrays, tangents: Arrays, **parameters: Any) -> Arrays:
    x, dy, mean, variance, gamma = kept
    if all(each is None for k, each in enumerate(tangents) if k != 1):
        return backward(x, tangents[1], mean, variance, gamma, **parameters)
    pairs = zip(kept, tangents, strict=True)
    # Forward mode is the transpose of reverse mode, so that there is one formula.
    push = jax.linear_transpose(
        lambda *cotangents: _backward_pulled(kept, cotangents, **parameters), dy, gamma, gamma
    )
    found: Arrays = push(
        tuple(_zeros_like(array) if each is None else each for array, each in pairs)
    )
    return found


def _backward_pulled(kept: Arrays, cotangents: Arrays, **parameters: Any) -> Arrays:
    _, dy, _, _, gamma = kept
    # The second order has an arithmetic of its own, and no reproducible sums.
    del parameters["arithmetic"], parameters["reproducible"]
    pairs = zip((dy, gamma, gamma), cotangents, strict=True)
    each = (_zeros_like(array) if each is None else each for array, each in pairs)
    return formulas.second_order(*kept, *each, **parameters)


give_derivative(
    BACKWARD,
    Rule(
        keep=lambda operands, _: operands,
        push=_backward_pushed,
        pull=_backward_pulled,
        like=(1, 4, 4),
    ),
)


def _normalize_pushed(kept: Arrays, tangents: Arrays, **parameters: Any) -> Arrays:
    x, mean, variance, gamma = kept
    dx, dmean, dvariance, dgamma, dbeta = tangents
    dy = None
    if dx is not None:
        dy, _, _ = backward(x, dx, mean, variance, gamma, training=False, **parameters)
    # What statistics owe to y is a scale and an offset for every channel, as parameters do.
    by_mean, by_variance = _by_statistics(variance, gamma, parameters["epsilon"])
    if dmean is not None:
        dbeta = by_mean * dmean if dbeta is None else dbeta + by_mean * dmean
    if dvariance is not None:
        dgamma = by_variance * dvariance if dgamma is None else dgamma + by_variance * dvariance
    return (_with_parameters(dy, x, mean, variance, dgamma, dbeta, **parameters),)


def _normalize_pulled(kept: Arrays, cotangents: Arrays, **parameters: Any) -> Arrays:
    x, mean, variance, gamma = kept
    (dy,) = cotangents
    dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, training=False, **parameters)
    by_mean, by_variance = _by_statistics(variance, gamma, parameters["epsilon"])
    return dx, by_mean * dbeta, by_variance * dgamma, dgamma, dbeta


def _by_statistics(
    variance: jax.Array, gamma: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Return the derivatives of y by mean, and by variance over (x - mean)*s."""
    s = inverse_deviation(variance, epsilon)
    return -gamma * s, -0.5 * gamma * s * s


give_derivative(
    NORMALIZE,
    Rule(
        keep=lambda operands, _: operands[:-1],
        push=_normalize_pushed,
        pull=_normalize_pulled,
        like=(0,),
    ),
)


def _statistics_pushed(kept: Arrays, tangents: Arrays, *, axis: int, **_: Any) -> Arrays:
    return formulas.statistics_pushed(*kept, *tangents, axis=axis)


def _statistics_pulled(kept: Arrays, cotangents: Arrays, *, axis: int, **_: Any) -> Arrays:
    x, mean = kept
    dmean, dvariance = cotangents
    return (_through_statistics(x, mean, dmean, dvariance, axis).astype(x.dtype),)


give_derivative(
    STATISTICS,
    Rule(
        keep=lambda operands, results: (*operands, results[0]),
        push=_statistics_pushed,
        pull=_statistics_pulled,
        like=(1, 1),
    ),
)


def _with_parameters(
    dy: Any,
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    dgamma: Any,
    dbeta: Any,
    reproducible: bool = False,
    **parameters: Any,
) -> Any:
    """Return the tangent dy with what those of gamma and beta add: y is linear in these."""
    if dgamma is None and dbeta is None:
        return dy
    dgamma = _zeros_like(mean) if dgamma is None else dgamma
    dbeta = _zeros_like(mean) if dbeta is None else dbeta
    (more,) = normalize(x, mean, variance, dgamma, dbeta, **parameters)
    return more if dy is None else dy + more


def _through_statistics(
    x: jax.Array, mean: jax.Array, dmean: Any, dvariance: Any, axis: int
) -> jax.Array:
    """Return dmean/M + 2*(x - mean)*dvariance/M."""
    dmean = _zeros_like(mean) if dmean is None else dmean
    dvariance = _zeros_like(mean) if dvariance is None else dvariance
    return formulas.through_statistics(x, mean, dmean, dvariance, axis=axis)


def _zeros_like(array: jax.Array) -> jax.Array:
    """Return zeros of the shape, type and mapped axes of an array."""
    return alike(jnp.zeros_like(array), array)[0]
