"""The few per-channel conversions that dialects need beyond the canonical operator.

All of it is on arrays of shape (C,), in float64, rounded once to the result's type.
"""

from __future__ import annotations

import numpy as np

from backnorm.arithmetics import own_arithmetic
from backnorm.cpu.average import averages
from backnorm.dtypes import FLOAT32, FLOAT64, element_type
from backnorm.errors import ArgumentValueError
from backnorm.executable import executable
from backnorm.problem import Problem

__all__ = [
    "bessel_correction",
    "blend",
    "check_inverse",
    "common_type",
    "native",
    "rounded",
    "running",
    "statistics_of",
    "undefined",
    "variance_of_inverse",
]


def running(
    old: tuple[np.ndarray, np.ndarray],
    new: tuple[np.ndarray, np.ndarray],
    weight: float,
    dtypes: tuple[np.dtype, np.dtype],
    scale: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return running mean and variance: `blend` of each, in its type.

    The new variance is multiplied by `scale` before, and rounded to its own type.
    """
    if dtypes == (FLOAT32, FLOAT32):
        found = averages(old, new, weight, scale)
        if found is not None:
            return found
    mean, variance = new
    if scale != 1.0:
        variance = rounded(np.multiply(variance, scale, dtype=FLOAT64), variance.dtype)
    return blend(old[0], mean, weight, dtypes[0]), blend(old[1], variance, weight, dtypes[1])


def blend(old: np.ndarray, new: np.ndarray, weight: float, dtype: np.dtype) -> np.ndarray:
    """Return ``(1 - weight) * old + weight * new`` in `dtype`.

    With weight 1 the old value is not looked at (it may be infinite or NaN), and the other way
    round with weight 0.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if weight == 1.0:
            return new.astype(dtype)
        if weight == 0.0:
            return old.astype(dtype)
        mixed: np.ndarray = np.multiply(old, 1.0 - weight, dtype=FLOAT64)
        mixed += np.multiply(new, weight, dtype=FLOAT64)
        return mixed.astype(dtype, copy=False)


def bessel_correction(count: int) -> float:
    """Return ``M / (M - 1)``, by which the biased variance becomes that of a sample; M = 1: 1."""
    return count / max(count - 1, 1)


def rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `values` in `dtype`; what is too large becomes infinite, as IEEE has it."""
    if values.dtype == dtype:
        return values
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def native(like: np.ndarray) -> np.dtype:
    """Return the element type of an array in this machine's byte order."""
    return element_type(like.dtype) or like.dtype.newbyteorder("=")


def undefined(like: np.ndarray) -> np.ndarray:
    """Return NaN for every channel: the statistics of no elements."""
    return np.full(like.shape, np.nan, like.dtype)


def variance_of_inverse(inverse: np.ndarray) -> np.ndarray:
    """Return, in float64, the v with ``1 / sqrt(v) == inverse``, to within 2^-52.

    That is variance + epsilon for an inverse standard deviation. It stays in float64: rounded to
    float32 it would cost the result its last bit. An infinite inverse (variance + epsilon = 0)
    becomes 1e-300, whose inverse root overflows float32 as it should, since a v of 0 is an
    error in the canonical operator; infinities are to propagate.

    Negative values have no meaning and give NaN; callers refuse them first.
    """
    wide = inverse.astype(FLOAT64)
    with np.errstate(divide="ignore", over="ignore"):
        v = 1.0 / (wide * wide)
    v = np.where(np.isposinf(wide), 1e-300, v)
    return np.where(wide < 0, np.nan, v)


def check_inverse(name: str, inverse: np.ndarray) -> None:
    """Raise if an inverse standard deviation is negative in some channel."""
    negative = np.flatnonzero(inverse.astype(FLOAT64) < 0)
    if negative.size:
        channel = int(negative[0])
        raise ArgumentValueError(
            name,
            f"an inverse standard deviation cannot be negative, but is in channel {channel}",
            came=inverse[channel],
            accepted="values >= 0 (infinity and NaN propagate)",
        )


def common_type(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays in one element type: themselves if they share it, else float32.

    Only float32 and 16-bit types are ever mixed, so that nothing is rounded.
    """
    if len({element_type(array.dtype) for array in arrays.values()}) <= 1:
        return arrays
    return {name: array.astype(FLOAT32) for name, array in arrays.items()}


def statistics_of(
    x: np.ndarray, channel_axes: tuple[int, ...], epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and biased variance of x in float64, whatever its results are computed in."""
    dtype = element_type(x.dtype)
    assert dtype is not None
    arithmetic = own_arithmetic(dtype)
    known = x.shape, channel_axes, dtype, FLOAT64
    problem = Problem("forward", *known, epsilon=epsilon, arithmetic=arithmetic)
    _, mean, variance, *_ = executable(problem, x).run(x, None, None, None, None, None)
    return mean, variance
