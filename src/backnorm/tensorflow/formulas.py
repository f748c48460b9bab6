"""Batch normalisation in plain TensorFlow operators.

These operators also run where TensorFlow cannot call Python, for example under XLA (see `nodes`).

Elements are computed in float64, and results of narrower types are rounded once. If the caller
chooses the arithmetic "float32", elements are computed in float32 instead. Sums are float64, except
that short rows of float32 elements are summed in float32. TensorFlow differentiates these
functions, to any order and in forward mode, and XLA compiles them.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from backnorm import formulas
from backnorm.errors import ArgumentValueError
from backnorm.options import Options

#: The type of per-channel tensors.
_CHANNELS = tf.float64
#: A row of float32 elements is summed up in float32 if it has at most this many elements.
_LONGEST_RUN = 128


class _Namespace:
    """TensorFlow's implementation of the protocol `backnorm.formulas.Namespace`, for one x.

    Per-channel tensors are float64, in a shape that broadcasts against x.
    """

    def __init__(self, x: Any, options: Options) -> None:
        rank, axis = _rank(x), options.axis
        self._shape = [-1 if k == axis else 1 for k in range(rank)]
        self._axes = [k for k in range(rank) if k != axis]
        size = x.shape[self._axes[-1]]
        # With rows of 40 and of 80 elements summed in float32, XLA took 0.2 to 0.4 times as long as
        # with all sums in float64 (one thread of an Intel Xeon).
        is_short = rank > 2 and size is not None and size <= _LONGEST_RUN
        self._run = self._axes[-1] if is_short else None
        sizes = tf.gather(tf.shape(x), self._axes)
        self.count = tf.cast(tf.maximum(tf.reduce_prod(sizes), 1), _CHANNELS)

    def channels(self, values: Any) -> Any:
        """Return a per-channel tensor (or None) as float64, in a shape that broadcasts with x."""
        return None if values is None else tf.reshape(tf.cast(values, _CHANNELS), self._shape)

    def sum(self, elements: Any) -> Any:
        if self._run is not None and elements.dtype != _CHANNELS:
            elements = tf.reduce_sum(elements, self._run, keepdims=True)
        return tf.reduce_sum(tf.cast(elements, _CHANNELS), self._axes, keepdims=True)

    def spread(self, channels: Any, elements: Any) -> Any:
        # The method `sum` adds up the elements of a channel in one step or, for short rows of
        # float32, in two steps (first each row in float32, then the sums of the rows in float64).
        # Here the channels are broadcast in the same steps, in reverse order, so that TensorFlow's
        # gradient of this function sums as `sum` does.
        if elements.dtype == channels.dtype:
            return channels
        shape, run = tf.shape(elements), self._run
        if run is None:
            return tf.cast(tf.broadcast_to(channels, shape), elements.dtype)
        rows = tf.concat([shape[:run], [1], shape[run + 1 :]], 0)
        return tf.broadcast_to(tf.cast(tf.broadcast_to(channels, rows), elements.dtype), shape)

    def scaled(self, elements: Any, s: Any, gamma: Any) -> Any:
        elements = elements * self.spread(s, elements)
        # `elements` are multiplied by one factor after the other. If `elements` were multiplied by
        # the product of the two factors, TensorFlow 2.21 would compute wrong second-order
        # derivatives in nested eager forward mode.
        return elements if gamma is None else elements * self.spread(gamma, elements)

    def rounded(self, channels: Any, elements: Any) -> Any:
        return tf.cast(tf.cast(channels, elements.dtype), _CHANNELS)

    def at_least(self, channels: Any, bound: Any) -> Any:
        return tf.maximum(channels, bound)


def forward(x: Any, gamma: Any, beta: Any, options: Options) -> tuple[Any, Any, Any]:
    """Return y, mean and variance."""
    _check(options)
    # x is converted once. If x were converted twice, each conversion would have a gradient.
    # TensorFlow would round both gradients to x's type and then add them.
    wide = _wide(x, options)
    xp = _Namespace(wide, options)
    mean, variance = formulas.statistics(xp, wide)
    # The mean may have more digits than the type in which elements are computed. So the mean is
    # subtracted in two parts: first the mean rounded to this type, then the remainder.
    high = xp.rounded(mean, wide)
    centred = wide - xp.spread(high, wide)
    if wide.dtype != _CHANNELS:
        centred -= xp.spread(mean - high, wide)
    y = _normalized(xp, centred, variance, gamma, beta, options)
    dtypes = [each.dtype for each in (gamma, beta) if each is not None]
    dtype = dtypes[0] if dtypes else tf.float64 if x.dtype == tf.float64 else tf.float32
    return tf.cast(y, x.dtype), _per_channel(mean, dtype), _per_channel(variance, dtype)


def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    """Return y."""
    wide = _wide(x, options)
    xp = _Namespace(wide, options)
    centred = wide - xp.spread(xp.channels(mean), wide)
    y = _normalized(xp, centred, xp.channels(variance), gamma, beta, options)
    return tf.cast(y, x.dtype)


def backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, options: Options
) -> tuple[Any, Any, Any]:
    """Return dx, dgamma and dbeta."""
    _check(options)
    wide, kind = _wide(x, options), mean.dtype
    xp = _Namespace(wide, options)
    mean, variance = map(xp.channels, (mean, variance))
    if options.training:
        # The mean and the variance have the values of the arguments, but are differentiated as
        # functions of x.
        own = formulas.statistics(xp, wide)
        pairs = zip((mean, variance), own, strict=True)
        mean, variance = (of_x + tf.stop_gradient(each - of_x) for each, of_x in pairs)
    s = tf.math.rsqrt(variance + options.epsilon)
    centred = wide - xp.spread(mean, wide)
    dx, dgamma, dbeta = formulas.gradients(
        xp, centred, _wide(dy, options), s, xp.channels(gamma), options.training
    )
    return tf.cast(dx, x.dtype), _per_channel(dgamma, kind), _per_channel(dbeta, kind)


def _normalized(
    xp: _Namespace, centred: Any, variance: Any, gamma: Any, beta: Any, options: Options
) -> Any:
    s = tf.math.rsqrt(variance + options.epsilon)
    return formulas.normalized(xp, centred, s, xp.channels(gamma), xp.channels(beta))


def _check(options: Options) -> None:
    """Raise if sums must be reproducible, because only kernels compute such sums."""
    if options.reproducible:
        raise ArgumentValueError(
            "reproducible",
            "must be False in forward mode (tf.autodiff.ForwardAccumulator), and if XLA compiles "
            "the function",
            came=True,
            accepted="False",
            hint="use a tf.GradientTape, and jit_compile=False",
        )


def _wide(x: Any, options: Options) -> Any:
    """Return x, cast to the type of the computation (`options.arithmetic`)."""
    return tf.cast(x, tf.float32 if options.arithmetic == "float32" else tf.float64)


def _per_channel(channels: Any, dtype: Any) -> Any:
    return tf.cast(tf.reshape(channels, [-1]), dtype)


def _rank(x: Any) -> int:
    rank: int | None = x.shape.rank
    if rank is None:
        raise ArgumentValueError(
            "x",
            "must have a known rank for XLA and in forward mode",
            accepted="a tensor of known rank",
            hint="set the shape, e.g. x = tf.ensure_shape(x, [None, None, None, 64])",
        )
    return rank
