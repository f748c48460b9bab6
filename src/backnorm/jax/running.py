"""A layer as a pure function, which takes running statistics and returns the updated ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax import check
from backnorm.jax.formulas import over_padding, promoted, working_type
from backnorm.jax.operators import batch_norm, batch_norm_inference
from backnorm.jax.problems import problem_of
from backnorm.options import Options
from backnorm.scalars import check_axis, check_flag, check_integer, check_number


class RunningStatistics(NamedTuple):
    """Averages of mean and variance over the batches so far, one value per channel.

    Attributes
    ----------
    mean, variance : jax.Array, shape (C,)
        The variance is the biased one.
    """

    mean: Any
    variance: Any

    @classmethod
    def start(cls, channels: int, dtype: Any = jnp.float32) -> RunningStatistics:
        """Return the running statistics of a new layer: mean 0, variance 1."""
        accepted = "an integer, 0 or more"
        channels = check_integer("channels", channels, accepted=accepted)
        if channels < 0:
            raise ArgumentValueError("channels", "must be >= 0", came=channels, accepted=accepted)
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
    """Normalise a batch as a layer does; return y and the updated running statistics.

    ::

        training:      y is computed with the statistics of the batch, and
                       state = momentum * state + (1 - momentum) * statistics of the batch
        not training:  y is computed with the running statistics, which do not change

    The results are differentiable like those of `batch_norm` and `batch_norm_inference`.

    Parameters
    ----------
    x : array, rank 1 or more
        float64, float32, float16 or bfloat16.
    state : RunningStatistics
        Statistics of any type that x may have; the new state has the same types.
        `RunningStatistics.start` makes a new state.
    gamma, beta : array, shape (C,), optional
        Scale and offset, 1 and 0 if absent; of any type that x may have. They are converted to
        float64 if x is float64, and to float32 otherwise.
    training : bool
        Whether to normalise with the statistics of the batch.
    epsilon : float
        Added to the variance; finite, not negative, and known when the function is traced.
    momentum : float
        The weight of the old running statistics, from 0 to 1, as in flax and equinox.
    axis, axis_name, axis_index_groups, mask, arithmetic, reproducible
        As in `batch_norm`; if not training, only `axis`, `mask` and `arithmetic` are used.

    Returns
    -------
    y : array
        The shape and type are x's.
    state : RunningStatistics

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm`; also if `state` is not a RunningStatistics, or `momentum` is not a number
        from 0 to 1.
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
    channels = {name: _widened(name, each, work) for name, each in channels.items()}
    values: dict[str, Any] = {"epsilon": epsilon, "axis": axis, "arithmetic": arithmetic}
    if not training:
        y = over_padding(
            lambda x: batch_norm_inference(x, **channels, **values), x, check.read_mask(mask, x)
        )
        return y, state
    options = Options(check.check_epsilon(epsilon), (check_axis(axis, x.ndim),))
    problem_of("inference", options, x=x, **channels)
    values |= {"axis_name": axis_name, "axis_index_groups": axis_index_groups}
    values |= {"mask": mask, "reproducible": reproducible}
    y, *batch = batch_norm(x, channels["gamma"], channels["beta"], **values)
    pairs = zip(state, batch, strict=True)
    return y, RunningStatistics(*(moved(old, new, momentum) for old, new in pairs))


def moved(running: Any, batch: jax.Array, momentum: Any) -> jax.Array:
    """Return a running average, updated by a batch's value, in the type of `running`."""
    work = promoted(running.dtype, batch.dtype)
    before, now = running.astype(work), ((1 - momentum) * batch).astype(work)
    return (momentum * before + now).astype(running.dtype)


def _check_momentum(momentum: Any) -> float:
    accepted = "a number from 0 to 1"
    number = check_number("momentum", momentum, accepted=accepted)
    if not 0 <= number <= 1:
        raise ArgumentValueError(
            "momentum",
            "must be the weight of the running statistics",
            came=number,
            accepted=accepted,
        )
    return number


def _widened(name: str, array: Any, work: Any) -> Any:
    """Return an array in type `work`, or unchanged if its type is not floating-point; an absent
    one is None.
    """
    array = check.read(name, array)
    if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(work)
