"""Compute parts of a gradient: the gradients of the parameters, and from them the gradient of x.

Some specifications have a separate operator for each of these parts. Calls of these operators are
checked like other calls, but they are not cached.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from backnorm.dialects._call import Call
from backnorm.dialects._statistics import native
from backnorm.dtypes import FLOAT32, FLOAT64
from backnorm.errors import ArgumentError
from backnorm.executable import run
from backnorm.problem import Problem
from backnorm.signature import Operation


def parameter_gradients(call: Call, dtype: np.dtype | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return dgamma and dbeta, summed in a wider type and rounded once, in the shape of the mean.

    ::

        dbeta  = sum dy
        dgamma = sum dy*(x - mean) / sqrt(variance + epsilon)

    The results have the type `dtype`. By default, it is the type of the mean, or the type of x if
    the call has no statistics. If the call has no statistics, the returned dgamma is meaningless.
    """
    mean, variance = call.by_role("mean"), call.by_role("variance")
    if mean is None:
        mean = np.zeros(call.kept_shape, native(call.by_role("x")))
        variance = mean + 1
    dtype = native(mean) if dtype is None else dtype
    dgamma, dbeta, _ = _run("backward_coefficients", call, dtype, mean, variance)
    return dgamma.reshape(mean.shape), dbeta.reshape(mean.shape)


def input_gradient(call: Call) -> np.ndarray:
    """Return dx in training, from the gradients of the parameters.

    If dgamma or dbeta is absent, it is computed in float64 and not rounded further.
    """
    dgamma, dbeta = map(call.by_role, ("dgamma", "dbeta"))
    if dgamma is None or dbeta is None:
        wide = parameter_gradients(call, FLOAT64)
        dgamma = wide[0] if dgamma is None else dgamma
        dbeta = wide[1] if dbeta is None else dbeta
    with np.errstate(all="ignore"):
        deviation = np.sqrt(call.by_role("variance").astype(FLOAT64) + _epsilon(call))
        sum_dy_xmu = dgamma.astype(FLOAT64) * deviation
    sums = dbeta.astype(FLOAT64).reshape(-1), sum_dy_xmu.reshape(-1)
    return gradient_of_sums(call, sums, call.count)


def gradient_of_sums(call: Call, sums: tuple[np.ndarray, np.ndarray], count: int) -> np.ndarray:
    """Return dx in training, from the float64 sums of dy and dy*(x - mean) over a batch.

    M is `count`, the number of elements per channel, s is the inverse standard deviation, and an
    absent gamma counts as 1::

        dx = gamma*s * (dy - sum_dy/M - (x - mean)*s^2 * sum_dy_xmu/M)
    """
    inverse = call.by_role("inverse_deviation")
    variance = call.by_role("variance") if inverse is None else inverse
    mean, gamma = call.by_role("mean"), call.by_role("gamma")
    types = {native(array) for array in (mean, variance, gamma) if array is not None}
    # Several types are always float32 and a 16-bit type, which float32 can represent.
    dtype = types.pop() if len(types) == 1 else FLOAT32
    dx: np.ndarray
    dx, _ = _run("apply", call, dtype, mean, variance, gamma, sums=sums, count=count)
    return dx


def _run(
    operation: Operation,
    call: Call,
    dtype: np.dtype,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    **numbers: Any,
) -> Any:
    """Run an operation on x, dy and per-channel operands, which are converted to `dtype`."""
    x, dy = call.by_role("x"), call.by_role("dy")
    words = call.schema.words
    problem = Problem(
        operation,
        x.shape,
        call.channel_axes,
        native(x),
        dtype,
        has_gamma=gamma is not None,
        epsilon=_epsilon(call),
        inverse="inverse_deviation" in words,
        arithmetic=call.arithmetic,
    )
    operands = {"x": x, "dy": dy, "mean": mean, "variance": variance, "gamma": gamma}
    try:
        return run(problem, problem.signature.arranged(operands), numbers=numbers)
    except ArgumentError as error:
        names = {"variance": words.get("inverse_deviation", ""), **words}
        raise error.in_words(names) from None


def _epsilon(call: Call) -> float:
    name = call.schema.words.get("epsilon")
    return 0.0 if name is None else call.number(name)
