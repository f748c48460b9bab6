"""Batch normalisation in plain TensorFlow operators, for where Python cannot be called.

Elements are computed in float64, so that results of other types are rounded once, or in float32
where that is asked for; sums are float64, those of short rows of float32 elements float32. The mean
is subtracted before anything else is done with x. TensorFlow differentiates the functions, to any
order and in forward mode, and XLA compiles them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from backnorm.errors import ArgumentValueError
from backnorm.tensorflow.calls import Options

__all__ = ["backward", "forward", "inference"]

#: What is computed a value a channel in.
_CHANNELS = tf.float64
#: Elements of float32 that are added up in float32, in a row.
_LONGEST_RUN = 128


def forward(
    x: Any,
    gamma: Any,
    beta: Any,
    options: Options,
    exchange: Callable[..., tuple[Any, Any, Any]] | None = None,
) -> tuple[Any, Any, Any]:
    """Return y, mean and variance.

    `exchange` makes the mean and variance of a whole batch, (C,), of those of its part x.
    """
    _check(options)
    # Once: a gradient that has two ways back to x would be rounded to x's type on each.
    wide = _wide(x, options)
    mean, variance = _statistics(wide, options)
    if exchange is not None:
        own = [tf.reshape(each, [-1]) for each in (mean, variance)]
        mean, variance, _ = exchange(*own, x)
        mean, variance = (_spread(each, x, options) for each in (mean, variance))
    # The elements' type need not hold the mean, but in two parts.
    high = tf.cast(tf.cast(mean, wide.dtype), _CHANNELS)
    centred = wide - _over(high, wide, options)
    if wide.dtype != _CHANNELS:
        centred -= _over(mean - high, wide, options)
    y = tf.cast(_normalized(centred, variance, gamma, beta, options), x.dtype)
    given = next((each.dtype for each in (gamma, beta) if each is not None), None)
    kind = given or (x.dtype if x.dtype == tf.float64 else tf.float32)
    return y, _per_channel(mean, kind), _per_channel(variance, kind)


def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    """Return y."""
    wide = _wide(x, options)
    mean, variance = (_spread(each, x, options) for each in (mean, variance))
    centred = wide - _over(mean, wide, options)
    return tf.cast(_normalized(centred, variance, gamma, beta, options), x.dtype)


def backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, options: Options
) -> tuple[Any, Any, Any]:
    """Return dx, dgamma and dbeta (`backnorm.batch_norm_backward` has the formulas)."""
    _check(options)
    kinds, x = (x.dtype, mean.dtype), _wide(x, options)
    given = [_spread(each, x, options) for each in (mean, variance)]
    if options.training:
        # The values that were given, which are functions of x when this is differentiated.
        of_x = _statistics(x, options)
        given = [own + tf.stop_gradient(each - own) for each, own in zip(given, of_x, strict=True)]
    dx = _wide(dy, options)
    s = _over(tf.math.rsqrt(given[1] + options.epsilon), x, options)
    normalised = (x - _over(given[0], x, options)) * s
    dbeta, dgamma = _sum(dx, options), _sum(dx * normalised, options)
    if options.training:
        count = _count(x, options)
        dx = dx - _over(dbeta / count, x, options) - normalised * _over(dgamma / count, x, options)
    dx = dx * s if gamma is None else dx * s * _over(_spread(gamma, x, options), x, options)
    of_x, kind = kinds
    return tf.cast(dx, of_x), _per_channel(dgamma, kind), _per_channel(dbeta, kind)


def _check(options: Options) -> None:
    """Raise if sums are asked for that only kernels have."""
    if options.reproducible:
        raise ArgumentValueError(
            "reproducible",
            "there are no reproducible sums in forward mode (tf.autodiff.ForwardAccumulator), nor "
            "where XLA compiles the function",
            came=True,
            accepted="False there",
            hint="use a tf.GradientTape, and jit_compile=False",
        )


def _wide(x: Any, options: Options) -> Any:
    """Return x in the type that its elements are computed in."""
    return tf.cast(x, tf.float32 if options.arithmetic == "float32" else tf.float64)


def _statistics(x: Any, options: Options) -> tuple[Any, Any]:
    """Return mean and variance in a shape that broadcasts against x; 0 of an empty batch.

    A sum of many numbers of one sign loses digits; the sum of what is left after a first mean has
    been subtracted does not. So the first mean is corrected by the mean of the remainders.
    """
    count = _count(x, options)
    # As it is subtracted.
    first = tf.cast(tf.cast(_sum(x, options) / count, x.dtype), _CHANNELS)
    centred = x - _over(first, x, options)
    correction = _sum(centred, options) / count
    squares = _sum(centred * centred, options) / count
    # Rounding must not leave a negative variance; NaN stays NaN.
    return first + correction, tf.maximum(squares - correction * correction, 0)


def _normalized(centred: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    y = centred * _over(tf.math.rsqrt(variance + options.epsilon), centred, options)
    # One factor after the other: of x - mean times the product of two channels' factors, TensorFlow
    # 2.21 has a wrong second order in eager forward mode within forward mode.
    y = y if gamma is None else y * _over(_spread(gamma, y, options), y, options)
    return y if beta is None else y + _over(_spread(beta, y, options), y, options)


def _others(x: Any, options: Options) -> list[int]:
    return [axis for axis in range(_rank(x)) if axis != options.axis]


def _count(x: Any, options: Options) -> Any:
    """Return the number of elements of a channel, or 1 if there are none."""
    sizes = tf.gather(tf.shape(x), _others(x, options))
    return tf.cast(tf.maximum(tf.reduce_prod(sizes), 1), _CHANNELS)


def _sum(x: Any, options: Options) -> Any:
    """Return the sum of every channel, in a shape that broadcasts against x."""
    run = _run(x, options)
    x = x if run is None else tf.reduce_sum(x, run, keepdims=True)
    return tf.reduce_sum(tf.cast(x, _CHANNELS), _others(x, options), keepdims=True)


def _run(x: Any, options: Options) -> int | None:
    """Return the axis along which elements of float32 are summed up in float32, or None.

    XLA took as long for float32 elements whose sums are all float64 as for float64 ones, and 0.2 to
    0.4 of that where rows of 40 and of 80 are float32 (one thread of an Intel Xeon).
    """
    axes = _others(x, options)
    size = x.shape[axes[-1]]
    is_short = len(axes) > 1 and size is not None and size <= _LONGEST_RUN
    return axes[-1] if is_short and x.dtype != _CHANNELS else None


def _spread(channels: Any, x: Any, options: Options) -> Any:
    """Return a per-channel tensor in a shape that broadcasts against x."""
    shape = [-1 if axis == options.axis else 1 for axis in range(_rank(x))]
    return tf.reshape(tf.cast(channels, _CHANNELS), shape)


def _over(spread: Any, x: Any, options: Options) -> Any:
    """Return what `_spread` does as it meets the elements of x, in their type.

    Gradients come back as `_sum` sums up: what is broadcast here they are summed up along.
    """
    if x.dtype == spread.dtype:
        return spread
    shape, run = tf.shape(x), _run(x, options)
    if run is None:
        return tf.cast(tf.broadcast_to(spread, shape), x.dtype)
    rows = tf.concat([shape[:run], [1], shape[run + 1 :]], 0)
    return tf.broadcast_to(tf.cast(tf.broadcast_to(spread, rows), x.dtype), shape)


def _per_channel(spread: Any, dtype: Any) -> Any:
    return tf.cast(tf.reshape(spread, [-1]), dtype)


def _rank(x: Any) -> int:
    rank: int | None = x.shape.rank
    if rank is None:
        raise ArgumentValueError(
            "x",
            "must have a known rank for XLA and in forward mode",
            accepted="a tensor of known rank",
            hint="say what it is, e.g. x = tf.ensure_shape(x, [None, None, None, 64])",
        )
    return rank
