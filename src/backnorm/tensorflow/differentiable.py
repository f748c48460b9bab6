"""The operators on tensors, with their gradients.

Each has the gradient of its mathematics, not of its operations: that of the forward is the backward
pass, that of the backward pass is `backnorm.batch_norm_double_backward`, and there it ends; with
reproducible sums it ends before. Where Python cannot be called (`modes.py`), they are formulas,
which TensorFlow differentiates. A function `_of_...` is the gradient of an operator (`nodes.py`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from backnorm.errors import BacknormError
from backnorm.tensorflow import calls, formulas
from backnorm.tensorflow.calls import Options
from backnorm.tensorflow.modes import wants_formulas
from backnorm.tensorflow.nodes import differentiable

__all__ = ["backward", "forward", "inference"]


def forward(x: Any, gamma: Any, beta: Any, options: Options, statistics: Any) -> tuple[Any, ...]:
    """Return y, mean and variance; gradients are those of y.

    Parameters
    ----------
    statistics : tf.DType or None
        Type of mean and variance; an eager call finds it itself.
    """
    if wants_formulas(x, gamma, beta):
        y, *moments = formulas.forward(x, gamma, beta, options)
        return y, *map(tf.stop_gradient, moments)
    operands, types = [x, gamma, beta], [statistics] * 2
    y, mean, variance = differentiable(
        "batch_norm", calls.forward, _of_forward, operands, options, [x], types
    )
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _of_forward(operands: Any, statistics: Any, cotangents: Any, options: Options) -> Any:
    x, gamma, _ = operands
    mean, variance = statistics
    # The statistics are behind stop_gradient: their cotangents are zero.
    dy, _, _ = cotangents
    return backward(x, dy, mean, variance, gamma, options)


def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    """Return y, which has gradients with respect to all five."""
    if wants_formulas(x, mean, variance, gamma, beta):
        return formulas.inference(x, mean, variance, gamma, beta, options)
    operands = [x, mean, variance, gamma, beta]
    (y,) = differentiable(
        "batch_norm_inference", calls.inference, _of_inference, operands, options, [x], []
    )
    return y


def _of_inference(operands: Any, _: Any, cotangents: Any, options: Options) -> Any:
    x, mean, variance, gamma, _ = operands
    (dy,) = cotangents
    dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, options)
    s = _inverse_deviation(variance, options)
    scale = s if gamma is None else gamma * s
    # y is linear in mean and in s, and ds/dvariance = -s**3/2.
    return [dx, -scale * dbeta, -0.5 * scale * s * dgamma, dgamma, dbeta]


def backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, options: Options
) -> tuple[Any, ...]:
    """Return dx, dgamma and dbeta, which have gradients with respect to x, dy and gamma.

    With frozen statistics also with respect to mean and variance; in training these are functions
    of x, and their part is in x's.
    """
    if options.training:
        # In a loop, a missing gradient becomes a zero that is computed with.
        mean, variance = tf.stop_gradient(mean), tf.stop_gradient(variance)
    if wants_formulas(x, dy, mean, variance, gamma):
        return formulas.backward(x, dy, mean, variance, gamma, options)
    operands, types = [x, dy, mean, variance, gamma], [mean.dtype] * 2
    return differentiable(
        "batch_norm_backward", calls.backward, _of_backward, operands, options, [x], types
    )


def _of_backward(operands: Any, statistics: Any, cotangents: Any, options: Options) -> Any:
    if options.reproducible:
        raise BacknormError(
            "backnorm: batch normalisation with reproducible sums is differentiable once, "
            "not twice; leave out reproducible=True"
        )
    of_x, of_dy, of_gamma = _double_backward([*operands, *cotangents], options)
    of_mean = of_variance = None
    if not options.training:
        *_, variance, gamma = operands
        dgamma, dbeta = statistics
        s = _inverse_deviation(variance, options)
        _, ddgamma, _ = cotangents
        of_s = ddgamma * dgamma + (of_gamma if gamma is None else gamma * of_gamma)
        of_mean, of_variance = -ddgamma * s * dbeta, -0.5 * s * s * of_s
    return [of_x, of_dy, of_mean, of_variance, of_gamma]


def _double_backward(operands: list[Any], options: Options) -> tuple[Any, ...]:
    """Return the gradients of the backward pass to x, dy and gamma; they have none themselves."""
    x, _, mean, *_ = operands
    like, types = [x, x], [mean.dtype]
    name, call = "batch_norm_double_backward", calls.double_backward
    return differentiable(name, call, _of_double_backward, operands, options, like, types)


def _of_double_backward(operands: Any, _: Any, cotangents: Any, options: Options) -> Any:
    raise BacknormError(
        "backnorm.tensorflow.batch_norm: there are no gradients of the third order, nor, "
        "by a tf.autodiff.ForwardAccumulator around a tf.function, of the second (put it "
        "within the function); else compose the normalisation of tf.reduce_mean and "
        "arithmetic"
    )


def _inverse_deviation(variance: Any, options: Options) -> Any:
    return tf.math.rsqrt(variance + options.epsilon)
