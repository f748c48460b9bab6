"""Batch normalisation of a batch in several replicas, with the statistics of the whole batch."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import tensorflow as tf

from backnorm.cpu.scratch import bin_rows
from backnorm.errors import BacknormError
from backnorm.tensorflow import calls, formulas
from backnorm.tensorflow.calls import Options
from backnorm.tensorflow.exchange import bins_of_all, moments_of_all, sums_of_all
from backnorm.tensorflow.modes import has_tangent, is_for_xla
from backnorm.tensorflow.nodes import compute, here, pick, place

__all__ = ["forward"]

# The types of sums and moments.
_WIDE = [tf.float64] * 2


class _Saved(NamedTuple):
    """The tensors of a backward pass.

    Attributes
    ----------
    exact, count : tf.Tensor, optional
        The variance in float64, and the number of elements of a channel of all replicas; absent for
        reproducible sums.
    """

    x: Any
    dy: Any
    mean: Any
    variance: Any
    gamma: Any
    exact: Any = None
    count: Any = None


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
    presence = [gamma is not None, beta is not None]

    def operation(x: Any, *parameters: Any) -> Any:
        x, gamma, beta = here([x, *place(parameters, presence)])
        y, mean, variance, *whole = _normalised(x, gamma, beta, options, statistics, replica)

        # The statistics are behind stop_gradient: their cotangents are zero.
        def gradient(dy: Any, *of_statistics: Any) -> Any:
            # A cotangent may be tf.IndexedSlices, as of tf.gather.
            dy = tf.convert_to_tensor(dy)
            saved = _Saved(x, dy, mean, variance, gamma, *whole)
            dx, dgamma, dbeta = _backward(saved, options, replica)
            return [dx, *pick([dgamma, dbeta], presence)]

        return (y, mean, variance), gradient

    y, mean, variance = tf.custom_gradient(operation)(x, *pick([gamma, beta], presence))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _backward(saved: _Saved, options: Options, replica: Any) -> tuple[Any, ...]:
    """Return the results of `_gradients`, which are not differentiable."""
    presence = [tensor is not None for tensor in saved]

    def operation(*present: Any) -> Any:
        tensors = _Saved(*here(place(present, presence)))
        return _gradients(tensors, options, replica), _refused

    return tuple(tf.custom_gradient(operation)(*pick(saved, presence)))


def _normalised(
    x: Any, gamma: Any, beta: Any, options: Options, statistics: Any, replica: Any
) -> list[Any]:
    """Return y of this part, mean and variance of the whole, and the rest of `_Saved`."""
    types = [statistics] * 2
    if options.reproducible:
        bins = _bins("batch_norm_binned_moments", calls.binned_moments, [x], options)
        operands = [x, gamma, beta, bins_of_all(bins, x, replica)]
        name = "batch_norm_apply_binned_moments"
        return compute(name, calls.apply_binned_moments, operands, options, [x], types)
    mean, variance = compute("batch_norm_moments", calls.moments, [x], options, [], _WIDE)
    mean, exact, count = moments_of_all(mean, variance, x, replica)
    operands = [x, gamma, beta, mean, exact]
    name = "batch_norm_apply_moments"
    results = compute(name, calls.apply_moments, operands, options, [x], types)
    return [*results, exact, count]


def _gradients(saved: _Saved, options: Options, replica: Any) -> tuple[Any, ...]:
    """Return dx, and dgamma and dbeta of this part.

    With reproducible sums dgamma and dbeta are those of the whole in the first replica, and zero in
    the others.
    """
    x, dy, mean, *_, exact, count = saved
    tensors, summed = saved[:5], [x, dy, mean]
    if options.reproducible:
        bins = _bins("batch_norm_binned_sums", calls.binned_sums, summed, options)
        operands, types = [*tensors, bins_of_all(bins, x, replica)], [mean.dtype] * 2
        name = "batch_norm_apply_binned_sums"
        dx, *of_all = compute(name, calls.apply_binned_sums, operands, options, [x], types)
        is_first = tf.equal(replica.replica_id_in_sync_group, 0)
        return (dx, *(tf.where(is_first, total, tf.zeros_like(total)) for total in of_all))
    dbeta, sum_dy_xmu = compute("batch_norm_sums", calls.sums, summed, options, [], _WIDE)
    operands = [*tensors, *sums_of_all(dbeta, sum_dy_xmu, replica), count]
    (dx,) = compute("batch_norm_apply_sums", calls.apply_sums, operands, options, [x], [])
    dgamma = sum_dy_xmu / tf.sqrt(exact + options.epsilon)
    return (dx, *(tf.cast(gradient, mean.dtype) for gradient in (dgamma, dbeta)))


def _bins(name: str, call: Any, tensors: list[Any], options: Options) -> Any:
    """Return reproducible sums of this part."""
    rows = [bin_rows(tensors[0].dtype.size)]
    (bins,) = compute(name, call, tensors, options, [], [tf.int64], rows)
    return bins


def _refused(*_: Any) -> NoReturn:
    raise BacknormError(
        "backnorm: batch normalisation over several replicas is differentiable once, not twice; "
        "use synchronized=False, or keras.layers.BatchNormalization"
    )
