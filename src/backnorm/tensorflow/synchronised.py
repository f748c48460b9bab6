"""Batch normalisation of a batch that lies in several replicas, with the statistics of it all."""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import tensorflow as tf

from backnorm.errors import BacknormError
from backnorm.tensorflow import calls, formulas
from backnorm.tensorflow.calls import Options
from backnorm.tensorflow.exchange import moments_of_all, sums_of_all
from backnorm.tensorflow.modes import has_tangent, is_for_xla
from backnorm.tensorflow.nodes import compute, here, pick, place

__all__ = ["forward"]

#: Of sums and moments.
_WIDE = [tf.float64] * 2


def forward(
    x: Any, gamma: Any, beta: Any, options: Options, statistics: Any, replica: Any
) -> tuple[Any, ...]:
    """Return y of this replica's part, and mean and variance of all; gradients are those of y.

    Parameters
    ----------
    statistics : tf.DType or None
        Type of mean and variance; an eager call finds it itself.
    replica : tf.distribute.ReplicaContext
        Of more than one replica.
    """
    if has_tangent(x, gamma, beta):
        raise BacknormError(
            "backnorm: batch normalisation over several replicas has no forward mode "
            "(tf.autodiff.ForwardAccumulator); use a tf.GradientTape, or synchronized=False"
        )
    if is_for_xla():
        exchange = partial(moments_of_all, replica=replica)
        y, *moments = formulas.forward(x, gamma, beta, options, exchange)
        return y, *map(tf.stop_gradient, moments)
    given = [gamma is not None, beta is not None]

    def operation(x: Any, *parameters: Any) -> Any:
        x, gamma, beta = here([x, *place(parameters, given)])
        mean, variance = compute("batch_norm_moments", calls.moments, [x], options, [], _WIDE)
        mean, exact, count = moments_of_all(mean, variance, x, replica)
        operands = [x, gamma, beta, mean, exact]
        y, mean, variance = compute(
            "batch_norm_apply_moments",
            calls.apply_moments,
            operands,
            options,
            [x],
            [statistics] * 2,
        )

        # The statistics are behind stop_gradient: their cotangents are zero.
        def gradient(dy: Any, *of_statistics: Any) -> Any:
            # What comes may be tf.IndexedSlices, as of tf.gather.
            dy = tf.convert_to_tensor(dy)
            known = [x, dy, mean, variance, gamma, exact, count]
            dx, dgamma, dbeta = _backward(known, options, replica)
            return [dx, *pick([dgamma, dbeta], given)]

        return (y, mean, variance), gradient

    y, mean, variance = tf.custom_gradient(operation)(x, *pick([gamma, beta], given))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _backward(known: list[Any], options: Options, replica: Any) -> tuple[Any, ...]:
    """Return dx, and dgamma and dbeta of this part; they have no gradients themselves.

    `known` are x, dy, mean, variance and gamma; the variance in float64; and the number of elements
    of a channel of all replicas.
    """
    given = [tensor is not None for tensor in known]

    def operation(*present: Any) -> Any:
        *tensors, exact, count = here(place(present, given))
        x, dy, mean, *_ = tensors
        dbeta, sum_dy_xmu = compute(
            "batch_norm_sums", calls.sums, [x, dy, mean], options, [], _WIDE
        )
        operands = [*tensors, *sums_of_all(dbeta, sum_dy_xmu, replica), count]
        (dx,) = compute("batch_norm_apply_sums", calls.apply_sums, operands, options, [x], [])
        dgamma = sum_dy_xmu / tf.sqrt(exact + options.epsilon)
        return (dx, *(tf.cast(each, mean.dtype) for each in (dgamma, dbeta))), _refused

    return tuple(tf.custom_gradient(operation)(*pick(known, given)))


def _refused(*_: Any) -> NoReturn:
    raise BacknormError(
        "backnorm: batch normalisation over several replicas is differentiable once, not twice; "
        "use synchronized=False, or keras.layers.BatchNormalization"
    )
