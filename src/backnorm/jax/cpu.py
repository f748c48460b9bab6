"""The computations on a CPU: our kernels, called by XLA itself.

Each function is traced when a primitive is lowered for a CPU. `elsewhere` is the primitive as plain
formulas; they are also taken for arrays without elements, and for shapes that are not known
(`jax.export` with symbolic dimensions), for which no kernel can be planned ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.jax import callback, ffi
from backnorm.jax.problems import is_known, problem_of

__all__ = ["backward", "forward", "normalize"]

_Elsewhere = Callable[..., Sequence[jax.Array]]


def forward(elsewhere: _Elsewhere, *operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return y, mean and variance of x, gamma, beta."""
    x, gamma, _ = operands
    if not is_known(x.shape):
        return elsewhere(*operands, **how)
    problem = problem_of("forward", x, gamma, **how)
    if ffi.reason_against() is not None:
        return callback.call(problem, operands, (x, gamma, gamma), **_spread(how))
    fields = ("x", "gamma", "beta")
    results = ((x, "out"), (gamma, "result"), (gamma, "result_2"))
    return ffi.call(problem, operands, fields, results, **_spread(how))


def normalize(elsewhere: _Elsewhere, *operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return y of x, mean, variance, gamma, beta."""
    x, mean, variance, gamma, beta = operands
    if not is_known(x.shape):
        return elsewhere(*operands, **how)
    problem = problem_of("inference", x, gamma, **how)
    operands = (x, mean, _not_refused(variance, how["epsilon"]), gamma, beta)
    if ffi.reason_against() is not None:
        return callback.call(problem, operands, (x,), **_spread(how))
    fields = ("x", "mean", "variance", "gamma", "beta")
    return ffi.call(problem, operands, fields, ((x, "out"),), **_spread(how))


def backward(elsewhere: _Elsewhere, *operands: jax.Array, **how: Any) -> Sequence[jax.Array]:
    """Return dx, dgamma and dbeta of x, dy, mean, variance, gamma."""
    x, dy, mean, variance, gamma = operands
    if not is_known(dy.shape):
        return elsewhere(*operands, **how)
    problem = problem_of("backward", x, gamma, **how)
    operands = (x, dy, mean, _not_refused(variance, how["epsilon"]), gamma)
    if ffi.reason_against() is not None:
        return callback.call(problem, operands, (dy, gamma, gamma), **_spread(how))
    fields = ("x", "dy", "mean", "variance", "gamma")
    results = ((dy, "out"), (gamma, "result"), (gamma, "result_2"))
    return ffi.call(problem, operands, fields, results, **_spread(how))


def _spread(how: dict[str, Any]) -> dict[str, Any]:
    return {name: how[name] for name in ("instances", "spread")}


def _not_refused(variance: jax.Array, epsilon: float) -> jax.Array:
    """Return the variance with NaN where a kernel would refuse it.

    A kernel reports a variance + epsilon that is not positive, but compiled code looks at no
    values: they propagate.
    """
    return jnp.where(variance + epsilon <= 0, jnp.nan, variance)
