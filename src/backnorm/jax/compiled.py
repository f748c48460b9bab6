"""The functions of `backnorm.jax.operators`, compiled: types, and what computes what."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from backnorm.activations import RELU, Activation
from backnorm.arithmetics import Arithmetic
from backnorm.jax import check, derivatives, formulas
from backnorm.jax.activations import activated, forward_relu
from backnorm.jax.check import Groups
from backnorm.jax.exchange import moments_of_all
from backnorm.jax.formulas import working_type
from backnorm.jax.mapped import alike

__all__ = ["Setting", "batch_norm", "batch_norm_backward", "batch_norm_inference"]

_compiled = partial(jax.jit, inline=True)


class Setting(NamedTuple):
    """What is the same for every call of a compiled function.

    Attributes
    ----------
    epsilon : float
    axis : int
        Where the channels are, not negative.
    arithmetic : {"float32", "float64"} or None
        What is asked for. None: what kernels and formulas have without that.
    reproducible : bool
        Whether sums do not depend on how the batch is cut.
    """

    epsilon: float
    axis: int
    arithmetic: Arithmetic | None
    reproducible: bool = False

    def of_elements(self) -> dict[str, Any]:
        """Return what counts where nothing is summed."""
        return {"epsilon": self.epsilon, "axis": self.axis, "arithmetic": self.arithmetic}


@partial(_compiled, static_argnames=("setting", "activation", "axis_name", "axis_index_groups"))
def batch_norm(
    x: Any,
    gamma: Any,
    beta: Any,
    mask: Any,
    residual: Any,
    *,
    setting: Setting,
    activation: Activation | None,
    axis_name: tuple[Hashable, ...],
    axis_index_groups: Groups | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return y, mean and variance."""
    operands = {"x": x, "residual": residual, "gamma": gamma, "beta": beta}
    problem = check.check_operands("forward", setting, activation=activation, **operands)
    activation, dtype = problem.activation, problem.statistics_dtype
    gamma, beta = _scale(gamma, x, setting.axis), _offset(beta, x, setting.axis)
    x, gamma, beta = alike(x, gamma, beta)
    if not axis_name and mask is None:
        if activation == RELU:
            inputs = alike(x, gamma, beta, *([] if residual is None else [residual]))
            y, mean, variance = forward_relu(*inputs, **setting._asdict())
        else:
            y, mean, variance = derivatives.forward(x, gamma, beta, **setting._asdict())
            y = activated(y, residual, activation)
    else:
        where: dict[str, Any] = {"axis": setting.axis, "arithmetic": setting.arithmetic}
        if mask is None:
            mean, variance = derivatives.statistics(x, **where)
            count = None
        else:
            mean, variance, count = formulas.masked_statistics(x, mask, **where)
        if axis_name:
            groups = {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
            mean, variance, count = moments_of_all(mean, variance, count, groups)
        if count is not None:
            nothing = jnp.where(count > 0, 0.0, jnp.nan).astype(mean.dtype)
            mean, variance = mean + nothing, variance + nothing
        work = working_type(x.dtype)
        inputs = alike(x, mean.astype(work), variance.astype(work), gamma, beta)
        (y,) = derivatives.normalize(*inputs, **setting.of_elements())
        y = activated(y, residual, activation)
    return y, mean.astype(dtype), variance.astype(dtype)


@partial(_compiled, static_argnames=("setting",))
def batch_norm_inference(
    x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, *, setting: Setting
) -> jax.Array:
    """Return y from operands statistics."""
    operands = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    check.check_operands("inference", setting, x=x, **operands)
    work = working_type(x.dtype)
    gamma, beta = _scale(gamma, x, setting.axis), _offset(beta, x, setting.axis)
    inputs = alike(x, mean.astype(work), variance.astype(work), gamma, beta)
    (y,) = derivatives.normalize(*inputs, **setting.of_elements())
    return y


@partial(_compiled, static_argnames=("setting", "training"))
def batch_norm_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, *, setting: Setting, training: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dx, dgamma and dbeta."""
    operands = {"mean": mean, "variance": variance, "gamma": gamma}
    dtype = check.check_operands("backward", setting, x=x, dy=dy, **operands).statistics_dtype
    work = working_type(x.dtype)
    gamma = _scale(gamma, x, setting.axis)
    inputs = alike(x, dy, mean.astype(work), variance.astype(work), gamma)
    options = setting._asdict()
    dx, dgamma, dbeta = derivatives.backward(*inputs, training=training, **options)
    return dx, dgamma.astype(dtype), dbeta.astype(dtype)


def _scale(gamma: Any, x: jax.Array, axis: int) -> jax.Array:
    """Return gamma, or ones, in the type of per-channel arrays.

    Statistics and parameter gradients of 16-bit parameters are rounded once, at the end.
    """
    work = working_type(x.dtype)
    return jnp.ones(x.shape[axis], work) if gamma is None else gamma.astype(work)


def _offset(beta: Any, x: jax.Array, axis: int) -> jax.Array:
    work = working_type(x.dtype)
    return jnp.zeros(x.shape[axis], work) if beta is None else beta.astype(work)
