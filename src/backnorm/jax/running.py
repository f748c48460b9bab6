"""A layer as a function: its running statistics come in and go out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax import check
from backnorm.jax.formulas import promoted, working_type
from backnorm.jax.operators import batch_norm, batch_norm_inference
from backnorm.jax.problems import Options
from backnorm.scalars import check_flag, check_integer, check_number

__all__ = ["RunningStatistics", "batch_norm_with_state", "moved"]


class RunningStatistics(NamedTuple):
    """Averages of mean and variance over the batches so far, a value for each channel.

    Attributes
    ----------
    mean, variance : jax.Array, shape (C,)
        The variance is the biased one.
    """

    mean: Any
    variance: Any

    @classmethod
    def start(cls, channels: int, dtype: Any = jnp.float32) -> RunningStatistics:
        """Return those of a layer that has seen no batch: mean 0, variance 1."""
        accepted = "an integer, 0 or more"
        channels = check_integer("channels", channels, accepted=accepted)
        if channels < 0:
            raise ArgumentValueError("channels", "is negative", came=channels, accepted=accepted)
        return cls(jnp.zeros(channels, dtype), jnp.ones(channels, dtype))


def batch_norm_with_state(
    x: Any,
    state: RunningStatistics,
    gamma: Any = None,
    beta: Any = None,
    *,
    training: bool,
    epsilon: float,
    momentum: float = 0.99,
    axis: int = -1,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> tuple[jax.Array, RunningStatistics]:
    """Normalise a batch as a layer does, and return its state after that.

    ::

        training:      y by the statistics of the batch,
                       state = momentum * state + (1 - momentum) * statistics of the batch
        not training:  y by the running statistics, which stay as they are

    Differentiable as `batch_norm` and `batch_norm_inference` are.

    Parameters
    ----------
    x : array, rank 1 or more
        float64, float32, float16 or bfloat16.
    state : RunningStatistics
        Of any of these types, which it keeps; `RunningStatistics.start` makes the first.
    gamma, beta : array, shape (C,), optional
        Scale and offset, 1 and 0 if absent. Of any of these types, too: they are converted
        to float64 beside a float64 x, and else to float32.
    training : bool
        Which statistics normalise.
    epsilon : float
        Added to the variance; finite, not negative, and known when the function is traced.
    momentum : float
        From 0 to 1, how much of the running statistics stays, as in flax and equinox.
    axis, axis_name, axis_index_groups, mask, arithmetic, reproducible
        As of `batch_norm`; only `axis` and `arithmetic` count where it is not training.

    Returns
    -------
    y : array
        Of x's shape and type.
    state : RunningStatistics

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm`; for a state that is none, and a momentum that is no number from 0 to 1.
    """
    training = check_flag("training", training)
    check_flag("reproducible", reproducible)
    momentum = _check_momentum(momentum)
    if not isinstance(state, RunningStatistics):
        raise ArgumentTypeError(
            "state", "must be the running statistics", came=type(state).__name__,
            accepted="backnorm.jax.RunningStatistics",
        )  # fmt: skip
    x = check.read("x", x)
    work = working_type(x.dtype)
    channels = {"mean": state.mean, "variance": state.variance, "gamma": gamma, "beta": beta}
    mean, variance, gamma, beta = (_widened(name, each, work) for name, each in channels.items())
    if not training:
        values: dict[str, Any] = {"epsilon": epsilon, "axis": axis, "arithmetic": arithmetic}
        return batch_norm_inference(x, mean, variance, gamma, beta, **values), state
    options = Options(check.check_epsilon(epsilon), check.check_axis(axis, x))
    operands = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    check.check_operands("inference", options, x=x, **operands)
    y, *batch = batch_norm(
        x,
        gamma,
        beta,
        epsilon=epsilon,
        axis=axis,
        axis_name=axis_name,
        axis_index_groups=axis_index_groups,
        mask=mask,
        arithmetic=arithmetic,
        reproducible=reproducible,
    )
    pairs = zip(state, batch, strict=True)
    return y, RunningStatistics(*(moved(old, new, momentum) for old, new in pairs))


def moved(running: Any, batch: jax.Array, momentum: Any) -> jax.Array:
    """Return a running average after a batch, of the type that it had."""
    work = promoted(running.dtype, batch.dtype)
    before, now = running.astype(work), ((1 - momentum) * batch).astype(work)
    return (momentum * before + now).astype(running.dtype)


def _check_momentum(momentum: Any) -> float:
    accepted = "a number from 0 to 1"
    number = check_number("momentum", momentum, accepted=accepted)
    if not 0 <= number <= 1:
        raise ArgumentValueError(
            "momentum", "must be a share of the running statistics", came=number, accepted=accepted
        )
    return number


def _widened(name: str, array: Any, work: Any) -> Any:
    """Return a per-channel array in another type, if it is a floating-point one."""
    if array is None and name in ("gamma", "beta"):
        return None
    array = check.read(name, array)
    return array.astype(work) if jnp.issubdtype(array.dtype, jnp.floating) else array
