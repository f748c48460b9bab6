"""The computations on a CPU: our kernels, called by XLA itself.

Each function is traced when a primitive is lowered for a CPU. `elsewhere` is the primitive as plain
formulas; they are also taken for arrays without elements, and for shapes that are not known
(`jax.export` with symbolic dimensions), for which no kernel can be planned ahead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backnorm.jax import callback, ffi
from backnorm.kernels.cpu import record
from backnorm.problem import Problem

__all__ = ["backward", "forward", "normalize"]

_Elsewhere = Callable[..., Sequence[jax.Array]]


def forward(elsewhere: _Elsewhere, *operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return y, mean and variance of x, gamma, beta."""
    x, gamma, _ = operands
    if not _is_known(x):
        return elsewhere(*operands, **how)
    problem = _problem("forward", x, gamma, **how)
    if ffi.reason_against() is not None:
        return callback.call(problem, operands, (x, gamma, gamma), **_spread(how))
    slots = (record.X, record.GAMMA, record.BETA)
    results = ((x, record.OUT), (gamma, record.RESULT), (gamma, record.RESULT_2))
    return ffi.call(problem, operands, slots, results, **_spread(how))


def normalize(elsewhere: _Elsewhere, *operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return y of x, mean, variance, gamma, beta."""
    x, mean, variance, gamma, beta = operands
    if not _is_known(x):
        return elsewhere(*operands, **how)
    problem = _problem("inference", x, gamma, **how)
    operands = (x, mean, _not_refused(variance, how["epsilon"]), gamma, beta)
    if ffi.reason_against() is not None:
        return callback.call(problem, operands, (x,), **_spread(how))
    slots = (record.X, record.MEAN, record.VARIANCE, record.GAMMA, record.BETA)
    return ffi.call(problem, operands, slots, ((x, record.OUT),), **_spread(how))


def backward(elsewhere: _Elsewhere, *operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return dx, dgamma and dbeta of x, dy, mean, variance, gamma."""
    x, dy, mean, variance, gamma = operands
    if not _is_known(dy):
        return elsewhere(*operands, **how)
    problem = _problem("backward", x, gamma, **how)
    operands = (x, dy, mean, _not_refused(variance, how["epsilon"]), gamma)
    if ffi.reason_against() is not None:
        return callback.call(problem, operands, (dy, gamma, gamma), **_spread(how))
    slots = (record.X, record.DY, record.MEAN, record.VARIANCE, record.GAMMA)
    results = ((dy, record.OUT), (gamma, record.RESULT), (gamma, record.RESULT_2))
    return ffi.call(problem, operands, slots, results, **_spread(how))


def _spread(how: dict[str, Any]) -> dict[str, Any]:
    return {name: how[name] for name in ("instances", "spread")}


def _is_known(x: jax.Array) -> bool:
    """Whether there are elements, and their number is known while tracing."""
    return all(isinstance(size, int) for size in x.shape) and x.size > 0


def _problem(
    operation: Any,
    x: jax.Array,
    gamma: jax.Array,
    *,
    epsilon: float,
    axis: int,
    spread: tuple[bool, ...],
    training: bool = True,
    instances: int | None,
) -> Problem:
    """Return the problem of one instance, as (outer, channels, inner)."""
    shape = x.shape[1:] if spread[0] else x.shape
    return Problem(
        operation,
        (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])),
        1,
        np.dtype(x.dtype),
        np.dtype(gamma.dtype),
        has_gamma=True,
        has_beta=operation != "backward",
        epsilon=epsilon,
        training=training and operation != "inference",
    )


def _not_refused(variance: jax.Array, epsilon: float) -> jax.Array:
    """Return the variance with NaN where a kernel would refuse it.

    A kernel reports a variance + epsilon that is not positive, but compiled code looks at no
    values: they propagate.
    """
    return jnp.where(variance + epsilon <= 0, jnp.nan, variance)
