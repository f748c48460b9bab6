"""The operators on tensors, with their gradients.

Each has the gradient of its mathematics, not of its operations: that of the forward is the backward
pass, that of the backward pass is `backnorm.batch_norm_double_backward`, and there it ends; with
reproducible sums it ends before. Where Python cannot be called (`modes.py`), they are formulas,
which TensorFlow differentiates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from backnorm.errors import BacknormError
from backnorm.tensorflow import calls, formulas
from backnorm.tensorflow.calls import Options
from backnorm.tensorflow.modes import wants_formulas
from backnorm.tensorflow.nodes import compute, here, pick, place

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
    given = [gamma is not None, beta is not None]

    def operation(x: Any, *parameters: Any) -> Any:
        x, gamma, beta = here([x, *place(parameters, given)])
        y, mean, variance = compute(
            "batch_norm", calls.forward, [x, gamma, beta], options, [x], [statistics] * 2
        )

        # The statistics are behind stop_gradient: their cotangents are zero.
        def gradient(dy: Any, *of_statistics: Any) -> Any:
            # What comes may be tf.IndexedSlices, as of tf.gather.
            dy = tf.convert_to_tensor(dy)
            dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, options)
            return [dx, *pick([dgamma, dbeta], given)]

        return (y, mean, variance), gradient

    y, mean, variance = tf.custom_gradient(operation)(x, *pick([gamma, beta], given))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, options: Options) -> Any:
    """Return y, which has gradients with respect to all five."""
    if wants_formulas(x, mean, variance, gamma, beta):
        return formulas.inference(x, mean, variance, gamma, beta, options)
    given = [gamma is not None, beta is not None]

    def operation(x: Any, mean: Any, variance: Any, *parameters: Any) -> Any:
        tensors = here([x, mean, variance, *place(parameters, given)])
        x, mean, variance, gamma, _ = tensors
        (y,) = compute("batch_norm_inference", calls.inference, tensors, options, [x], [])

        def gradient(dy: Any) -> Any:
            # What comes may be tf.IndexedSlices, as of tf.gather.
            dy = tf.convert_to_tensor(dy)
            dx, dgamma, dbeta = backward(x, dy, mean, variance, gamma, options)
            s = _inverse_deviation(variance, options)
            scale = s if gamma is None else gamma * s
            # y is linear in mean and in s, and ds/dvariance = -s**3/2.
            of_statistics = [-scale * dbeta, -0.5 * scale * s * dgamma]
            return [dx, *of_statistics, *pick([dgamma, dbeta], given)]

        return y, gradient

    return tf.custom_gradient(operation)(x, mean, variance, *pick([gamma, beta], given))


def backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, options: Options
) -> tuple[Any, ...]:
    """Return dx, dgamma and dbeta, which have gradients with respect to x, dy and gamma.

    With frozen statistics also with respect to mean and variance; in training these are functions
    of x, and their part is in x's.
    """
    if wants_formulas(x, dy, mean, variance, gamma):
        return formulas.backward(x, dy, mean, variance, gamma, options)
    given = [gamma is not None]

    def operation(x: Any, dy: Any, mean: Any, variance: Any, *parameters: Any) -> Any:
        tensors = here([x, dy, mean, variance, *place(parameters, given)])
        x, _, mean, variance, gamma = tensors
        dx, dgamma, dbeta = compute(
            "batch_norm_backward", calls.backward, tensors, options, [x], [mean.dtype] * 2
        )

        def gradient(*cotangents: Any) -> Any:
            if options.reproducible:
                raise BacknormError(
                    "backnorm: batch normalisation with reproducible sums is differentiable once, "
                    "not twice; leave out reproducible=True"
                )
            cotangents = tuple(map(tf.convert_to_tensor, cotangents))
            of_x, of_dy, of_gamma = _double_backward([*tensors, *cotangents], options)
            of_mean = of_variance = None
            if not options.training:
                s = _inverse_deviation(variance, options)
                _, ddgamma, _ = cotangents
                of_s = ddgamma * dgamma + (of_gamma if gamma is None else gamma * of_gamma)
                of_mean, of_variance = -ddgamma * s * dbeta, -0.5 * s * s * of_s
            return [of_x, of_dy, of_mean, of_variance, *pick([of_gamma], given)]

        return (dx, dgamma, dbeta), gradient

    results = tf.custom_gradient(operation)(x, dy, mean, variance, *pick([gamma], given))
    return tuple(results)


def _double_backward(tensors: Sequence[Any], options: Options) -> tuple[Any, ...]:
    """Return the gradients of the backward pass to x, dy and gamma; they have none themselves."""
    given = [tensor is not None for tensor in tensors]

    def operation(*present: Any) -> Any:
        everything = place(present, given)
        x, _, mean = everything[:3]
        results = compute(
            "batch_norm_double_backward",
            calls.double_backward,
            everything,
            options,
            [x, x],
            [mean.dtype],
        )

        def gradient(*cotangents: Any) -> Any:
            raise BacknormError(
                "backnorm.tensorflow.batch_norm: there are no gradients of the third order, nor, "
                "by a tf.autodiff.ForwardAccumulator around a tf.function, of the second (put it "
                "within the function); else compose the normalisation of tf.reduce_mean and "
                "arithmetic"
            )

        return tuple(results), gradient

    return tuple(tf.custom_gradient(operation)(*pick(tensors, given)))


def _inverse_deviation(variance: Any, options: Options) -> Any:
    return tf.math.rsqrt(variance + options.epsilon)
