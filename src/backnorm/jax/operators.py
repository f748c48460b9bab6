"""Batch normalisation on JAX arrays: the public functions and the compiled functions they call."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.activations import RELU, Activation, check_activation
from backnorm.arithmetics import Arithmetic, requested
from backnorm.dtypes import FLOAT64
from backnorm.jax import check, derivatives, formulas
from backnorm.jax.check import Groups
from backnorm.jax.formulas import working_type
from backnorm.jax.problems import Options, problem_of
from backnorm.scalars import check_axis, check_flag

_compiled = partial(jax.jit, inline=True)


def batch_norm(
    x: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    axis: int = -1,
    axis_name: Hashable | tuple[Hashable, ...] | None = None,
    axis_index_groups: Sequence[Sequence[int]] | None = None,
    mask: Any = None,
    activation: str | Activation | None = None,
    residual: Any = None,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalise a batch with its own statistics.

    mean and variance are those of each channel of x; the variance is the biased one (divided by the
    number of elements). y = gamma * (x - mean) / sqrt(variance + epsilon) + beta. The residual, if
    there is one, is added to y; then the activation is applied.

    y, mean and variance are differentiable in x, gamma and beta, in reverse and in forward mode
    (`jax.grad`, `jax.jvp`, `jax.linearize`, `jax.hessian`), to any order. Under `jax.vmap` every
    problem of the batch has its own statistics.

    Parameters
    ----------
    x : array, rank 1 or more
        float64, float32, float16 or bfloat16.
    gamma, beta : array, shape (C,), optional
        Scale and offset, 1 and 0 if absent; of x's type, for a 16-bit x also float32.
    epsilon : float
        Added to the variance; finite, not negative, and known when the function is traced.
    axis : int
        The axis of the channels.
    axis_name : str or tuple of str, optional
        Mapped axes (of `jax.shard_map`, `jax.pmap` or `jax.vmap`) over which the batch is split.
        The statistics are those of all parts, which must have the same shape. Gradients are those
        of the textbook formula with `jax.lax.pmean`.
    axis_index_groups : sequence of sequences of int, optional
        Groups of indices on these axes, as in `jax.lax.pmean`: each group is a separate batch.
    mask : array of bool, optional
        The elements of x from which the statistics are computed, in a shape that broadcasts to x's.
        y is computed for all elements. An element outside the mask that is NaN or infinite has the
        y NaN, and the gradient 0; it changes no other result and no other gradient. If the mask
        selects no element of a channel, the statistics and y of the channel are NaN. With
        `axis_name` the mask may select different numbers of elements in each part.
    activation : {"relu", "relu6", "silu", "hardswish"} or backnorm.Activation, optional
        ``Activation("relu", ceiling)`` is min(ceiling, max(0, y)); the derivative of a ReLU is 0
        where y is 0 or the ceiling. `jax.nn` computes activations, except that the kernel on one
        CPU device computes "relu" in the same pass if there is no `axis_name` and no `mask`.
    residual : array, optional
        Added before a ReLU; of x's shape and type.
    arithmetic : {"float32", "float64"}, optional
        The compute dtype of elements and of short sums, here and in derivatives of the first order.
        None: the setting of `backnorm.arithmetic` when the function is traced. If formulas run
        instead of kernels, "float64" requires ``jax_enable_x64``, and the default for float32
        elements is float32.
    reproducible : bool
        Whether y, mean, variance and reverse-mode gradients have the same bits for every order of
        the elements of a channel and every layout. The bits are those of backnorm's functions for
        NumPy. Only on one CPU device, and without `axis_name` and `mask`.

    Returns
    -------
    y : array
        The shape and type are x's.
    mean, variance : array, shape (C,)
        The type is gamma's (without gamma and beta: x's, or float32 for a 16-bit x). They are 0
        for an empty batch.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For a wrong type, shape, axis or epsilon, when the function is traced. Values are not
        checked: NaN, infinity, and a variance + epsilon of 0 propagate. JAX raises its own errors
        for arrays that were deleted or donated (RuntimeError), or are on several devices
        (ValueError).

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
    """
    x, gamma, beta, residual = _read(x=x, gamma=gamma, beta=beta, residual=residual)
    names = check.check_axis_name(axis_name)
    groups = names, check.check_axis_index_groups(axis_index_groups, names)
    if check_flag("reproducible", reproducible) and (names or mask is not None):
        raise check.not_reproducible("with axis_name" if names else "with a mask")
    options = _options(x, epsilon, axis, arithmetic, reproducible)
    operands = x, gamma, beta, check.read_mask(mask, x), residual
    activation = check_activation(activation)
    return _batch_norm(operands, options=options, activation=activation, groups=groups)


def batch_norm_inference(
    x: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    beta: Any = None,
    *,
    epsilon: float,
    axis: int = -1,
    arithmetic: Arithmetic | None = None,
) -> jax.Array:
    """Normalise with given statistics: y = gamma * (x - mean) / sqrt(variance + epsilon) + beta.

    y is differentiable with respect to x, mean, variance, gamma and beta.

    Parameters
    ----------
    x : array, rank 1 or more
        float64, float32, float16 or bfloat16.
    mean, variance : array, shape (C,)
        Statistics, of x's type; for a 16-bit x also float32.
    gamma, beta : array, shape (C,), optional
        Scale and offset, of mean's type; 1 and 0 if absent.
    epsilon : float
        Added to the variance; finite, not negative, and known when the function is traced.
    axis : int
        The axis of the channels.
    arithmetic : {"float32", "float64"}, optional
        As in `batch_norm`.

    Returns
    -------
    array
        y, of x's shape and type.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm`.
    """
    operands = _read(x=x, mean=mean, variance=variance, gamma=gamma, beta=beta)
    options = _options(operands[0], epsilon, axis, arithmetic)
    return _batch_norm_inference(operands, options=options)


def batch_norm_backward(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    epsilon: float,
    axis: int = -1,
    training: bool = True,
    arithmetic: Arithmetic | None = None,
    reproducible: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of batch normalisation.

    With M elements per channel, s = 1/sqrt(variance + epsilon) and c = x - mean::

        dbeta  = sum dy
        dgamma = s * sum dy*c
        dx     = gamma*s * (dy - sum(dy)/M - c * s**2 * sum(dy*c)/M)     training
        dx     = gamma*s * dy                                            frozen statistics

    The gradients are differentiable with respect to all five arrays. Their derivatives treat mean
    and variance as arguments that do not depend on x. If mean and variance are results of
    `batch_norm`, JAX adds, by the chain rule, the terms with the derivatives of mean and variance
    in x.

    Parameters
    ----------
    x : array, rank 1 or more
        Input of the forward pass: float64, float32, float16 or bfloat16.
    dy : array
        Gradient of the loss with respect to the output, of x's shape and type.
    mean, variance : array, shape (C,)
        Mean and biased variance of the forward pass, of x's type; for a 16-bit x also float32.
    gamma : array, shape (C,), optional
        Scale, of mean's type; 1 if absent.
    epsilon : float
        Added to the variance; finite, not negative, and known when the function is traced.
    axis : int
        The axis of the channels.
    training : bool
        True: the statistics depended on x. False: they were constants.
    arithmetic : {"float32", "float64"}, optional
        As in `batch_norm`.
    reproducible : bool
        Whether dx, dgamma and dbeta have the same bits for every order of the elements of a channel
        and every layout: see `batch_norm`. Only on one CPU device.

    Returns
    -------
    dx : array
        The shape and type are x's.
    dgamma, dbeta : array, shape (C,)
        The type is mean's.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm`.

    References
    ----------
    Ioffe and Szegedy, "Batch Normalization", 2015, section 3.
    """
    operands = _read(x=x, dy=dy, mean=mean, variance=variance, gamma=gamma)
    options = _options(operands[0], epsilon, axis, arithmetic, reproducible)
    options = options._replace(training=check_flag("training", training))
    return _batch_norm_backward(operands, options=options)


@partial(_compiled, static_argnames=("options", "activation", "groups"))
def _batch_norm(
    operands: tuple[Any, ...],
    *,
    options: Options,
    activation: Activation | None,
    groups: tuple[tuple[Hashable, ...], Groups | None],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return y, mean and variance from x, gamma, beta, mask and residual.

    `mask` selects the elements that mean and variance are computed from. `groups` is a pair: the
    mapped axes that the batch is split over, and the value of JAX's argument `axis_index_groups`,
    which may be None.
    """
    x, gamma, beta, mask, residual = operands
    arrays = {"x": x, "residual": residual, "gamma": gamma, "beta": beta}
    relu = activation if activation is not None and activation.name == "relu" else None
    problem = problem_of("forward", options, activation=relu, **arrays)
    activation, dtype = problem.activation or activation, problem.statistics_dtype
    gamma, beta = _scale_and_offset(x, gamma, beta, options)
    if groups[0] or mask is not None:
        mean, variance = _statistics(x, mask, options, groups)
        channels = mean, variance, gamma, beta
        y = formulas.over_padding(partial(_normalized, channels=channels, options=options), x, mask)
    elif activation == RELU:
        inputs = [x, gamma, beta, *([] if residual is None else [residual])]
        y, mean, variance = derivatives.forward_relu(*inputs, options=options)
        activation = None
    else:
        y, mean, variance = derivatives.forward(x, gamma, beta, options=options)
    return formulas.activated(y, residual, activation), mean.astype(dtype), variance.astype(dtype)


def _statistics(
    x: jax.Array, mask: Any, options: Options, groups: tuple[Any, Any]
) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance; both are NaN in a channel in which the mask selects no element."""
    count = None
    if mask is None:
        mean, variance = derivatives.statistics(x, options=options)
    else:
        mean, variance, count = formulas.masked_statistics(x, mask, options)
    if groups[0]:
        names = dict(zip(("axis_name", "axis_index_groups"), groups, strict=True))
        mean, variance, count = formulas.moments_of_all(mean, variance, count, names)
    if count is not None:
        nothing = jnp.where(count > 0, 0.0, jnp.nan).astype(mean.dtype)
        mean, variance = mean + nothing, variance + nothing
    return mean, variance


@partial(_compiled, static_argnames=("options",))
def _batch_norm_inference(operands: tuple[Any, ...], *, options: Options) -> jax.Array:
    """Return y from x, mean, variance, gamma and beta."""
    x, mean, variance, gamma, beta = operands
    arrays = {"mean": mean, "variance": variance, "gamma": gamma, "beta": beta}
    problem_of("inference", options, x=x, **arrays)
    gamma, beta = _scale_and_offset(x, gamma, beta, options)
    return _normalized(x, (mean, variance, gamma, beta), options)


@partial(_compiled, static_argnames=("options",))
def _batch_norm_backward(
    operands: tuple[Any, ...], *, options: Options
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return dx, dgamma and dbeta from x, dy, mean, variance and gamma."""
    x, dy, mean, variance, gamma = operands
    arrays = {"mean": mean, "variance": variance, "gamma": gamma}
    dtype = problem_of("backward", options, x=x, dy=dy, **arrays).statistics_dtype
    work = working_type(x.dtype)
    gamma, _ = _scale_and_offset(x, gamma, None, options)
    inputs = x, dy, mean.astype(work), variance.astype(work), gamma
    dx, dgamma, dbeta = derivatives.backward(*inputs, options=options)
    return dx, dgamma.astype(dtype), dbeta.astype(dtype)


def _normalized(x: jax.Array, channels: tuple[jax.Array, ...], options: Options) -> jax.Array:
    """Return y; `channels` are mean, variance, gamma and beta."""
    work = working_type(x.dtype)
    (y,) = derivatives.normalize(x, *(each.astype(work) for each in channels), options=options)
    return y


def _scale_and_offset(
    x: jax.Array, gamma: Any, beta: Any, options: Options
) -> tuple[jax.Array, jax.Array]:
    """Return gamma (ones if it is None) and beta (zeros if None) in the type of per-channel arrays.

    16-bit parameters are converted to float32. Therefore statistics and parameter gradients are
    also computed in float32, and are rounded to 16 bits only once, at the end.
    """
    work, channels = working_type(x.dtype), x.shape[options.axis]
    gamma = jnp.ones(channels, work) if gamma is None else gamma.astype(work)
    return gamma, jnp.zeros(channels, work) if beta is None else beta.astype(work)


def _options(
    x: Any, epsilon: Any, axis: Any, arithmetic: Any, reproducible: Any = False
) -> Options:
    epsilon, axis = check.check_epsilon(epsilon), check_axis(axis, x.ndim)
    # JAX converts a float64 NumPy array to JAX's default float type, which is float32 unless
    # `jax_enable_x64` is set.
    dtype = jnp.result_type(float) if x.dtype == FLOAT64 else x.dtype
    reproducible = check_flag("reproducible", reproducible)
    return Options(epsilon, axis, requested(dtype, arithmetic), reproducible)


def _read(**arrays: Any) -> tuple[Any, ...]:
    return tuple(check.read(name, value) for name, value in arrays.items())
