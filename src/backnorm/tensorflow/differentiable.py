"""The operators on tensors, with their gradients.

The gradient of the forward pass is the backward pass. The gradient of the backward pass is
`backnorm.batch_norm_double_backward`, whose gradient raises an error when it is computed. With
reproducible sums, the gradient of the backward pass does so. Where a graph cannot call Python
(`nodes.wants_formulas`), TensorFlow's own operations (`formulas.py`) replace the kernels, and
TensorFlow differentiates these operations. A function whose name begins with `_of_` computes the
gradient of an operator (`nodes.py`).
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from backnorm.options import Options
from backnorm.tensorflow import calls, formulas
from backnorm.tensorflow.nodes import Node, differentiable, refused, wants_formulas

_ONCE = (
    "backnorm: batch normalisation with reproducible sums is differentiable once, not twice; leave "
    "out reproducible=True"
)
_TWICE = (
    "backnorm.tensorflow.batch_norm has no gradients of the third order. A "
    "tf.autodiff.ForwardAccumulator around a tf.function has none of the second order: put the "
    "accumulator into the function. Otherwise, compose the normalisation from tf.reduce_mean and "
    "arithmetic operators"
)


def forward(x: Any, gamma: Any, beta: Any, options: Options, statistics: Any) -> tuple[Any, ...]:
    """Return y, mean and variance; only y has gradients.

    Parameters
    ----------
    statistics : tf.DType or None
        Type of mean and variance; not used in an eager call.
    """
    if wants_formulas(x, gamma, beta):
        y, *moments = formulas.forward(x, gamma, beta, options)
        return y, *map(tf.stop_gradient, moments)
    node = Node("batch_norm", calls.forward, _of_forward, [x], [statistics] * 2)
    y, mean, variance = differentiable(node, [x, gamma, beta], options)
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _of_forward(operands: Any, statistics: Any, cotangents: Any, options: Options) -> Any:
    x, gamma, _ = operands
    mean, variance = statistics
    # `forward` returns mean and variance through `stop_gradient`, so the cotangents of both are
    # zero, and are ignored here.
    dy, _, _ = cotangents
    return backward(x, dy, mean, variance, gamma, options)


def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    """Return y, which has gradients with respect to all five tensors."""
    if wants_formulas(x, mean, variance, gamma, beta):
        return formulas.inference(x, mean, variance, gamma, beta, options)
    node = Node("batch_norm_inference", calls.inference, _of_inference, [x])
    (y,) = differentiable(node, [x, mean, variance, gamma, beta], options)
    return y


def _of_inference(operands: Any, _: Any, cotangents: Any, options: Options) -> Any:
    x, mean, variance, gamma, _ = operands
    (dy,) = cotangents
    dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, options)
    s = _inverse_deviation(variance, options)
    scale = s if gamma is None else gamma * s
    # The gradients with respect to mean and variance follow from y = gamma*s*(x - mean) + beta,
    # which is linear in mean and in s, and from ds/dvariance = -s**3/2.
    return [dx, -scale * dbeta, -0.5 * scale * s * dgamma, dgamma, dbeta]


def backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, options: Options
) -> tuple[Any, ...]:
    """Return dx, dgamma and dbeta, which have gradients with respect to x, dy and gamma.

    With frozen statistics, these three results also have gradients with respect to mean and
    variance. In training, mean and variance are functions of x, and the gradient of x includes the
    gradients through them.
    """
    if options.training:
        # `_of_backward` returns no gradients of mean and variance. In a loop, TensorFlow would
        # replace these missing gradients by zeros; `tf.stop_gradient` says that there are none.
        mean, variance = tf.stop_gradient(mean), tf.stop_gradient(variance)
    if wants_formulas(x, dy, mean, variance, gamma):
        return formulas.backward(x, dy, mean, variance, gamma, options)
    node = Node("batch_norm_backward", calls.backward, _of_backward, [x], [mean.dtype] * 2)
    return differentiable(node, [x, dy, mean, variance, gamma], options)


def _of_backward(operands: Any, statistics: Any, cotangents: Any, options: Options) -> Any:
    if options.reproducible:
        return refused(operands, cotangents, options, _ONCE, _of_backward)
    x, _, mean, *_ = operands
    name, call = "batch_norm_double_backward", calls.double_backward
    node = Node(name, call, _of_double_backward, [x, x], [mean.dtype])
    of_x, of_dy, of_gamma = differentiable(node, [*operands, *cotangents], options)
    of_mean = of_variance = None
    if not options.training:
        *_, variance, gamma = operands
        dgamma, dbeta = statistics
        s = _inverse_deviation(variance, options)
        _, ddgamma, _ = cotangents
        of_s = ddgamma * dgamma + (of_gamma if gamma is None else gamma * of_gamma)
        of_mean, of_variance = -ddgamma * s * dbeta, -0.5 * s * s * of_s
    return [of_x, of_dy, of_mean, of_variance, of_gamma]


def _of_double_backward(operands: Any, _: Any, cotangents: Any, options: Options) -> Any:
    return refused(operands, cotangents, options, _TWICE, _of_double_backward)


def _inverse_deviation(variance: Any, options: Options) -> Any:
    return tf.math.rsqrt(variance + options.epsilon)
