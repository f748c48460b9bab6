"""The computations with their derivatives, right to any order.

The derivative of the forward pass is the backward pass. That of the backward pass is a formula, in
which mean and variance are arguments like x: where they are functions of x the forward pass adds
what they owe, and the two are the closed form that others write down. From the third order on JAX
differentiates that formula.

No collective stands inside a derivative that is defined here: those of the statistics of several
devices are between them, where JAX differentiates them as it does for any other code.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from backnorm.jax import formulas, primitives
from backnorm.jax.mapped import alike
from backnorm.jax.primitives import Setting

__all__ = ["backward", "forward", "normalize", "statistics"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def forward(
    setting: Setting, x: jax.Array, gamma: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return y, mean and variance."""
    y, mean, variance = primitives.forward(setting, x, gamma, beta)
    return y, mean, variance


def _forward_keeping(setting: Setting, x: Any, gamma: Any, beta: Any) -> Any:
    result = forward(setting, x.value, gamma.value, beta.value)
    _, mean, variance = result
    return result, (x.value, mean, variance, gamma.value)


def _forward_pulled_back(setting: Setting, kept: Any, cotangents: Any) -> Any:
    x, mean, variance, gamma = kept
    dy, dmean, dvariance = cotangents
    dy = _zeros_like(x) if isinstance(dy, SymbolicZero) else dy
    dx, dgamma, dbeta = backward(setting, True, x, dy, mean, variance, gamma)
    # The statistics are seldom differentiated: running averages are not.
    if not (isinstance(dmean, SymbolicZero) and isinstance(dvariance, SymbolicZero)):
        more = _through_statistics(x, mean, dmean, dvariance, setting.axis)
        dx = (dx.astype(more.dtype) + more).astype(x.dtype)
    return dx, dgamma, dbeta


forward.defvjp(_forward_keeping, _forward_pulled_back, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def backward(
    setting: Setting,
    training: bool,
    x: jax.Array,
    dy: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dx, dgamma and dbeta."""
    dx, dgamma, dbeta = primitives.backward(setting, training, x, dy, mean, variance, gamma)
    return dx, dgamma, dbeta


def _backward_keeping(setting: Setting, training: bool, *inputs: jax.Array) -> Any:
    return backward(setting, training, *inputs), inputs


@partial(jax.jit, static_argnums=(0, 1), inline=True)
def _backward_pulled_back(setting: Setting, training: bool, kept: Any, cotangents: Any) -> Any:
    return formulas.second_order(*kept, *cotangents, training=training, **setting._asdict())


backward.defvjp(_backward_keeping, _backward_pulled_back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def normalize(
    setting: Setting,
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
) -> jax.Array:
    """Return y from given statistics."""
    return primitives.normalize(setting, x, mean, variance, gamma, beta)


def _normalize_keeping(setting: Setting, *inputs: jax.Array) -> Any:
    return normalize(setting, *inputs), inputs[:-1]


def _normalize_pulled_back(setting: Setting, kept: Any, dy: jax.Array) -> Any:
    x, mean, variance, gamma = kept
    dx, dgamma, dbeta = backward(setting, False, x, dy, mean, variance, gamma)
    s = formulas.inverse_deviation(variance, setting.epsilon)
    return dx, -gamma * s * dbeta, -0.5 * gamma * s * s * dgamma, dgamma, dbeta


normalize.defvjp(_normalize_keeping, _normalize_pulled_back)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def statistics(axis: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance."""
    return formulas.statistics(x, axis=axis)


def _statistics_keeping(axis: int, x: Any) -> Any:
    mean, variance = statistics(axis, x.value)
    return (mean, variance), (x.value, mean)


def _statistics_pulled_back(axis: int, kept: Any, cotangents: Any) -> Any:
    x, mean = kept
    dmean, dvariance = cotangents
    return (_through_statistics(x, mean, dmean, dvariance, axis).astype(x.dtype),)


statistics.defvjp(_statistics_keeping, _statistics_pulled_back, symbolic_zeros=True)


def _through_statistics(
    x: jax.Array, mean: jax.Array, dmean: Any, dvariance: Any, axis: int
) -> jax.Array:
    """Return dmean/M + 2*(x - mean)*dvariance/M."""
    dmean = _zeros_like(mean) if isinstance(dmean, SymbolicZero) else dmean
    dvariance = _zeros_like(mean) if isinstance(dvariance, SymbolicZero) else dvariance
    return formulas.through_statistics(x, mean, dmean, dvariance, axis=axis)


def _zeros_like(array: jax.Array) -> jax.Array:
    """Return zeros of the shape, type and mapped axes of an array."""
    return alike(jnp.zeros_like(array), array)[0]
