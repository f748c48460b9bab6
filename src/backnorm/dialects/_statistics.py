"""Conversions of per-channel arrays before or after backnorm's own operations, for dialects."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from backnorm.arithmetics import own_arithmetic
from backnorm.dtypes import FLOAT64, element_type, rounded
from backnorm.errors import ArgumentValueError
from backnorm.executable import run
from backnorm.problem import Problem


def native(like: Any) -> np.dtype:
    """Return the element type of a checked array, in this machine's byte order."""
    dtype: np.dtype | None = element_type(like.dtype)
    assert dtype is not None
    return dtype


def variance_of_inverse(inverse: np.ndarray) -> np.ndarray:
    """Return the v for which ``1 / sqrt(v) == inverse``, in float64.

    `inverse` is an inverse standard deviation, so v is variance + epsilon. The relative error of v
    is at most 2^-52. v is not rounded to float32, because that would change the last bit of
    results. If `inverse` is infinite, variance + epsilon was 0. In this case v is 1e-300 instead of
    0, because backnorm's operations reject variance + epsilon = 0. With this v, 1 / sqrt(v) is
    1e150, which overflows in float32. So results of 32 or 16 bits become infinite or NaN, as they
    must be for an infinite inverse.

    A negative `inverse` is invalid, and v is then NaN. Callers reject negative values before they
    call this function.
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


def statistics_of(
    x: np.ndarray, channel_axes: tuple[int, ...], epsilon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and biased variance of x as float64 arrays, computed in the default arithmetic of
    x's type.
    """
    known = x.shape, channel_axes, native(x), FLOAT64
    arithmetic = own_arithmetic(native(x))
    problem = Problem("forward", *known, epsilon=epsilon, arithmetic=arithmetic)
    _, mean, variance, *_ = run(problem, (x, None, None, None, None, None))
    return mean, variance


def given_statistics(
    roles: Collection[str], mean: np.ndarray, variance: np.ndarray, epsilon: float
) -> dict[str, np.ndarray]:
    """Return results of a forward pass whose statistics are given, in new arrays, by role.

    The statistics of the batch and the running statistics are those that are given.
    """
    known = {"mean": mean, "variance": variance}
    if "inverse_deviation" in roles:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            known["inverse_deviation"] = 1.0 / np.sqrt(np.add(variance, epsilon, dtype=FLOAT64))
    known |= {f"running_{role}": known[role] for role in ("mean", "variance")}
    types = {role: native(mean if role.endswith("mean") else variance) for role in known}
    return {role: rounded(known[role], types[role]).copy() for role in roles if role in known}
