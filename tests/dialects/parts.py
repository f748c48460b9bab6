"""Cases and checks of the functions that compute a part of a gradient."""

from __future__ import annotations

import numpy as np

from backnorm.conformance.judge import judge
from backnorm.reference import Exact

EPSILON = 1e-3


def inputs_of(shape, kept, dtype, channel=None, seed=0):
    """Return random x, dy and per-channel tensors with 1 in the axes that are not kept."""
    rng = np.random.default_rng(seed)
    reduced = tuple(axis for axis in range(len(shape)) if axis not in kept)
    x = (rng.normal(size=shape) * 3 + 1).astype(dtype)
    wide = x.astype(float)
    mean, variance = wide.mean(reduced, keepdims=True), wide.var(reduced, keepdims=True)
    if not reduced:
        variance = variance + 1.0
    values = {"mean": mean, "variance": variance, "gamma": rng.normal(size=mean.shape)}
    operands = {"x": x, "dy": rng.normal(size=shape).astype(dtype)}
    operands |= {name: value.astype(channel or dtype) for name, value in values.items()}
    for array in operands.values():
        array.flags.writeable = False
    return operands


def check_input_gradient(dx, operands, dgamma, dbeta, epsilon):
    """Judge dx by the formula that CANN's reference has for its two coefficients and the gain."""
    x, dy, mean, variance, gamma, scale, offset = (
        np.asarray(array, np.longdouble)
        for array in (
            *(operands[n] for n in ("x", "dy", "mean", "variance", "gamma")),
            dgamma,
            dbeta,
        )
    )
    count = np.longdouble(x.size // mean.size)
    deviation = np.sqrt(variance + np.longdouble(np.float32(epsilon)))
    multiplier = -scale / count / deviation
    addend = mean / deviation * (scale / count) - offset / count
    gain = gamma / deviation
    exact = ((dy + multiplier * x) + addend) * gain
    terms = abs(gain) * (abs(dy) + abs(offset / count) + abs(multiplier * (x - mean)))
    high = exact.astype(float)
    verdict = judge(
        "dx",
        dx,
        Exact(high, (exact - high).astype(float)),
        terms.astype(float),
        operands["x"].dtype,
    )
    assert verdict.passed, verdict.detail
