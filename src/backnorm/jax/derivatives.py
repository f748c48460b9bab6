"""The computations of `primitives`, with derivatives of any order, in forward and in reverse mode.

The derivative of the forward pass is the backward pass, in forward as in reverse mode, because the
Jacobian of y with respect to x is symmetric. The derivative of the backward pass is a formula in
which mean and variance are arguments that do not depend on x. If the forward pass computed mean and
variance from x, JAX differentiates this forward pass, too. This adds the terms that contain the
derivatives of mean and variance with respect to x. The sum of all terms is the second-order
gradient in closed form. For derivatives of the third and higher orders, JAX differentiates this
formula.

No derivative that is defined here contains a collective operation, such as `psum`. JAX itself
differentiates the collectives that compute the statistics of several devices.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.jax import formulas
from backnorm.jax.differentiable import Arrays, give_derivative
from backnorm.jax.inverse_std import inverse_std
from backnorm.jax.primitives import (
    BACKWARD,
    FORWARD,
    FORWARD_RELU,
    NORMALIZE,
    STATISTICS,
    alike,
    bind,
)
from backnorm.options import Options

#: Return y, mean and variance from x, gamma and beta.
forward = partial(bind, FORWARD)
#: Return relu(y + residual), mean and variance from x, gamma, beta and an optional residual.
forward_relu = partial(bind, FORWARD_RELU)
#: Return dx, dgamma and dbeta from x, dy, mean, variance and gamma.
backward = partial(bind, BACKWARD)
#: Return a tuple with one array, y, computed from x, mean, variance, gamma and beta.
normalize = partial(bind, NORMALIZE)
#: Return mean and variance from x.
statistics = partial(bind, STATISTICS)


def _forward_pushed(residuals: Arrays, tangents: Arrays, options: Options) -> Arrays:
    """Return the tangents of y, mean and variance; None stands for a tangent of y that is zero."""
    x, mean, variance, gamma = residuals
    dx, dgamma, dbeta = tangents
    dy, dmean, dvariance = None, _zeros_like(mean), _zeros_like(mean)
    if dx is not None:
        dy, sum_dx_h, sum_dx = backward(x, dx, mean, variance, gamma, options=options)
        count = formulas.count_of(x, options.axis)
        s = inverse_std(variance, options.epsilon)
        dmean, dvariance = sum_dx / count, 2 * (sum_dx_h / count) / s
    return _with_parameters(dy, residuals, dgamma, dbeta, options), dmean, dvariance


def _forward_pulled(residuals: Arrays, cotangents: Arrays, options: Options) -> Arrays:
    """Return the cotangents of x, gamma and beta."""
    x, mean, variance, gamma = residuals
    dy, dmean, dvariance = cotangents
    dy = _zeros_like(x) if dy is None else dy
    dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, options=options)
    # Usually the statistics have no cotangents, because running averages are not differentiated.
    if not (dmean is None and dvariance is None):
        more = _through_statistics(x, mean, dmean, dvariance, options)
        dx = (dx.astype(more.dtype) + more).astype(x.dtype)
    return dx, dgamma, dbeta


give_derivative(
    FORWARD,
    keep=lambda operands, results: (operands[0], *results[1:], operands[1]),
    push=_forward_pushed,
    pull=_forward_pulled,
    like=(0, 1, 1),
)


def _relu_pushed(residuals: Arrays, tangents: Arrays, options: Options) -> Arrays:
    *of_forward, y = residuals
    dy, dmean, dvariance = _forward_pushed(tuple(of_forward), tangents[:3], options)
    moved = tangents[3] if tangents[3:] else None
    if moved is not None:
        dy = moved if dy is None else dy + moved
    return _where_positive(y, dy), dmean, dvariance


def _relu_pulled(residuals: Arrays, cotangents: Arrays, options: Options) -> Arrays:
    *of_forward, y = residuals
    dy, *of_statistics = cotangents
    dy = _where_positive(y, jnp.zeros_like(y) if dy is None else dy)
    return *_forward_pulled(tuple(of_forward), (dy, *of_statistics), options), dy


def _where_positive(y: jax.Array, dy: jax.Array) -> jax.Array:
    return jnp.where(y > 0, dy, jnp.zeros_like(dy))


give_derivative(
    FORWARD_RELU,
    keep=lambda operands, results: (operands[0], *results[1:], operands[1], results[0]),
    push=_relu_pushed,
    pull=_relu_pulled,
    like=(0, 1, 1),
)


def _backward_pushed(residuals: Arrays, tangents: Arrays, options: Options) -> Arrays:
    x, dy, mean, variance, gamma = residuals
    if all(each is None for k, each in enumerate(tangents) if k != 1):
        return backward(x, tangents[1], mean, variance, gamma, options=options)
    # Forward mode is computed as the transpose of reverse mode, so that both use one formula. The
    # results are rounded after the transpose: JAX can transpose only linear functions, and rounding
    # is not linear.
    wide = jnp.result_type(float)
    results = dy, gamma, gamma
    pull_back = jax.linear_transpose(
        lambda *cotangents: formulas.wide_second_order(residuals, cotangents, options),
        *(each.astype(wide) for each in results),
    )
    pairs = zip(residuals, tangents, strict=True)
    filled = (_zeros_like(array) if each is None else each for array, each in pairs)
    return formulas.rounded_like(pull_back(tuple(each.astype(wide) for each in filled)), results)


def _backward_pulled(residuals: Arrays, cotangents: Arrays, options: Options) -> Arrays:
    _, dy, _, _, gamma = residuals
    pairs = zip((dy, gamma, gamma), cotangents, strict=True)
    filled = tuple(_zeros_like(array) if each is None else each for array, each in pairs)
    return formulas.second_order(residuals, filled, options)


give_derivative(
    BACKWARD,
    keep=lambda operands, _: operands,
    push=_backward_pushed,
    pull=_backward_pulled,
    like=(1, 4, 4),
)


def _normalize_pushed(residuals: Arrays, tangents: Arrays, options: Options) -> Arrays:
    x, mean, variance, gamma = residuals
    dx, dmean, dvariance, dgamma, dbeta = tangents
    dy, frozen = None, options._replace(training=False)
    if dx is not None:
        dy, _, _ = backward(x, dx, mean, variance, gamma, options=frozen)
    # A tangent of the mean has the same effect as a tangent of beta that is `by_mean` times as
    # large. A tangent of the variance has the same effect as a tangent of gamma that is
    # `by_variance` times as large.
    by_mean, by_variance = _by_statistics(variance, gamma, options.epsilon)
    if dmean is not None:
        dbeta = by_mean * dmean if dbeta is None else dbeta + by_mean * dmean
    if dvariance is not None:
        dgamma = by_variance * dvariance if dgamma is None else dgamma + by_variance * dvariance
    return (_with_parameters(dy, residuals, dgamma, dbeta, options),)


def _normalize_pulled(residuals: Arrays, cotangents: Arrays, options: Options) -> Arrays:
    x, mean, variance, gamma = residuals
    (dy,) = cotangents
    frozen = options._replace(training=False)
    dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, options=frozen)
    by_mean, by_variance = _by_statistics(variance, gamma, options.epsilon)
    return dx, by_mean * dbeta, by_variance * dgamma, dgamma, dbeta


def _by_statistics(
    variance: jax.Array, gamma: jax.Array, epsilon: float
) -> tuple[jax.Array, jax.Array]:
    """Return two numbers per channel, for y = gamma*s * (x - mean) + beta.

    The first is the derivative of y by the mean. The second is the derivative of y by the variance,
    divided by (x - mean)*s.
    """
    s = inverse_std(variance, epsilon)
    return -gamma * s, -0.5 * gamma * s * s


give_derivative(
    NORMALIZE,
    keep=lambda operands, _: operands[:-1],
    push=_normalize_pushed,
    pull=_normalize_pulled,
    like=(0,),
)


def _statistics_pushed(residuals: Arrays, tangents: Arrays, options: Options) -> Arrays:
    (x, mean), (dx,) = residuals, tangents
    return formulas.statistics_pushed(x, mean, dx, options.axis)


def _statistics_pulled(residuals: Arrays, cotangents: Arrays, options: Options) -> Arrays:
    (x, mean), (dmean, dvariance) = residuals, cotangents
    return (_through_statistics(x, mean, dmean, dvariance, options).astype(x.dtype),)


give_derivative(
    STATISTICS,
    keep=lambda operands, results: (*operands, results[0]),
    push=_statistics_pushed,
    pull=_statistics_pulled,
    like=(1, 1),
)


def _with_parameters(
    dy: Any, residuals: Arrays, dgamma: Any, dbeta: Any, options: Options
) -> jax.Array | None:
    """Return the tangent of y. It is the sum of two parts: `dy`, which comes from the tangent of x,
    and the part that comes from `dgamma` and `dbeta`.
    """
    if dgamma is None and dbeta is None:
        return dy
    x, mean, variance, _ = residuals
    dgamma = _zeros_like(mean) if dgamma is None else dgamma
    dbeta = _zeros_like(mean) if dbeta is None else dbeta
    (more,) = normalize(x, mean, variance, dgamma, dbeta, options=options)
    return more if dy is None else dy + more


def _through_statistics(
    x: jax.Array, mean: jax.Array, dmean: Any, dvariance: Any, options: Options
) -> jax.Array:
    """Return the part of x's cotangent that comes from the cotangents of its mean and variance."""
    dmean = _zeros_like(mean) if dmean is None else dmean
    dvariance = _zeros_like(mean) if dvariance is None else dvariance
    return formulas.through_statistics(x, mean, dmean, dvariance, options.axis)


def _zeros_like(array: jax.Array) -> jax.Array:
    """Return zeros with the shape, the type and the mapped axes (see `alike`) of an array."""
    return alike(jnp.zeros_like(array), array)[0]
