"""Inverse standard deviations, correct even for subnormal variances, which XLA flushes to 0."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_refused(variance: jax.Array, epsilon: float) -> jax.Array:
    """Return, for each channel, whether variance + epsilon is not positive.

    Subnormal numbers count with their own values, although XLA's arithmetic on a CPU flushes them
    to 0.
    """
    sign, magnitude = _bits(variance)
    # `bound` is the smallest number of the variance's type that is at least epsilon.
    with np.errstate(over="ignore"):
        bound = np.asarray(epsilon, variance.dtype)
    if float(bound) < epsilon:
        bound = np.nextafter(bound, np.asarray(np.inf, variance.dtype))
    refused = sign & (magnitude >= _bits(jnp.asarray(bound))[1])
    if epsilon != 0:
        return refused
    # These bits cannot be compared with 0: LLVM would turn this integer comparison into a
    # comparison of the floating-point number with 0. If the number is subnormal, XLA then flushes
    # it to 0, and the result is wrong.
    return refused | (jnp.sqrt(magnitude.astype(variance.dtype)) < 0.5)


def inverse_std(variance: jax.Array, epsilon: float, dtype: Any = None) -> jax.Array:
    """Return 1/sqrt(variance + epsilon) in `dtype`. If epsilon > 0, a result that is too large for
    this type is replaced by the type's largest number.

    On a CPU, XLA flushes subnormal numbers to 0. So subnormal variances are read as integers from
    their bits, in units of the smallest subnormal number.
    """
    wide = variance.astype(dtype or variance.dtype)
    limits = jnp.finfo(variance.dtype)
    if epsilon >= float(limits.tiny):
        return jax.lax.rsqrt(wide + epsilon)
    _, magnitude = _bits(variance)
    is_small = magnitude < _bits(jnp.asarray(limits.tiny))[1]
    # Here, Python code must not compute with subnormal numbers, such as 2**exponent: XLA may have
    # set this thread to flush subnormal numbers to zero.
    exponent = limits.minexp - limits.nmant
    unit = math.ldexp(epsilon, -exponent)
    of_small = 2.0 ** (-exponent / 2) * jax.lax.rsqrt(magnitude.astype(wide.dtype) + unit)
    if epsilon > 0:
        # The upper limit in the next line matters only if epsilon is less than the smallest
        # subnormal number of variance's type.
        of_small = jnp.minimum(of_small, min(epsilon**-0.5, float(jnp.finfo(wide.dtype).max)))
    return jnp.where(is_small, of_small, jax.lax.rsqrt(jnp.where(is_small, 1, wide) + epsilon))


def _bits(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return, for each number, whether its sign bit is set, and its other bits as an integer."""
    whole = jnp.int64 if array.dtype == jnp.float64 else jnp.int32
    bits = jax.lax.bitcast_convert_type(array, whole)
    return bits < 0, bits & jnp.iinfo(whole).max
