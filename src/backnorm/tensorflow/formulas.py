"""Batch normalisation in plain TensorFlow operators, for where Python cannot be called.

All arithmetic is in float64, so that results of other types are rounded once, and the mean is
subtracted before anything else is done with x. TensorFlow differentiates the functions, to any
order and in forward mode, and XLA compiles them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from backnorm.errors import ArgumentValueError
from backnorm.tensorflow.calls import Options

__all__ = ["backward", "forward", "inference"]

_WIDE = tf.float64


def forward(x: Any, gamma: Any, beta: Any, options: Options) -> tuple[Any, Any, Any]:
    """Return y, mean and variance."""
    # Once: a gradient that has two ways back to x would be rounded to x's type on each.
    wide = tf.cast(x, _WIDE)
    mean, variance = _statistics(wide, options)
    y = tf.cast(_normalized(wide, mean, variance, gamma, beta, options), x.dtype)
    given = next((each.dtype for each in (gamma, beta) if each is not None), None)
    kind = given or (x.dtype if x.dtype == _WIDE else tf.float32)
    return y, _per_channel(mean, kind), _per_channel(variance, kind)


def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    """Return y."""
    mean, variance = (_spread(each, x, options) for each in (mean, variance))
    y = _normalized(tf.cast(x, _WIDE), mean, variance, gamma, beta, options)
    return tf.cast(y, x.dtype)


def backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, options: Options
) -> tuple[Any, Any, Any]:
    """Return dx, dgamma and dbeta (`backnorm.batch_norm_backward` has the formulas)."""
    kinds, x = (x.dtype, mean.dtype), tf.cast(x, _WIDE)
    given = [_spread(each, x, options) for each in (mean, variance)]
    if options.training:
        # The values that were given, which are functions of x when this is differentiated.
        of_x = _statistics(x, options)
        given = [own + tf.stop_gradient(each - own) for each, own in zip(given, of_x, strict=True)]
    axes, dx = _others(x, options), tf.cast(dy, _WIDE)
    s = tf.math.rsqrt(given[1] + options.epsilon)
    normalised = (x - given[0]) * s
    dbeta = tf.reduce_sum(dx, axes, keepdims=True)
    dgamma = tf.reduce_sum(dx * normalised, axes, keepdims=True)
    if options.training:
        count = _count(x, options)
        dx = dx - dbeta / count - normalised * (dgamma / count)
    dx = dx * s if gamma is None else dx * s * _spread(gamma, x, options)
    of_x, kind = kinds
    return tf.cast(dx, of_x), _per_channel(dgamma, kind), _per_channel(dbeta, kind)


def _statistics(x: Any, options: Options) -> tuple[Any, Any]:
    """Return mean and variance in a shape that broadcasts against x; 0 of an empty batch.

    A sum of many numbers of one sign loses digits; the sum of what is left after a first mean has
    been subtracted does not. So the first mean is corrected by the mean of the remainders.
    """
    axes, count = _others(x, options), _count(x, options)
    first = tf.reduce_sum(x, axes, keepdims=True) / count
    centred = x - first
    correction = tf.reduce_sum(centred, axes, keepdims=True) / count
    squares = tf.reduce_sum(centred * centred, axes, keepdims=True) / count
    # Rounding must not leave a negative variance; NaN stays NaN.
    return first + correction, tf.maximum(squares - correction * correction, 0)


def _normalized(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    y = (x - mean) * tf.math.rsqrt(variance + options.epsilon)
    # One factor after the other: of x - mean times the product of two channels' factors, TensorFlow
    # 2.21 has a wrong second order in eager forward mode within forward mode.
    y = y if gamma is None else y * _spread(gamma, x, options)
    return y if beta is None else y + _spread(beta, x, options)


def _others(x: Any, options: Options) -> list[int]:
    return [axis for axis in range(_rank(x)) if axis != options.axis]


def _count(x: Any, options: Options) -> Any:
    """Return the number of elements of a channel, or 1 if there are none."""
    sizes = tf.gather(tf.shape(x), _others(x, options))
    return tf.cast(tf.maximum(tf.reduce_prod(sizes), 1), _WIDE)


def _spread(channels: Any, x: Any, options: Options) -> Any:
    """Return a per-channel tensor in the type of the arithmetic, to broadcast against x."""
    shape = [-1 if axis == options.axis else 1 for axis in range(_rank(x))]
    return tf.reshape(tf.cast(channels, _WIDE), shape)


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
