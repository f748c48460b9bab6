"""Batch normalisation of a batch that is split over replicas, with statistics of the whole batch.

Replicas exchange float64 or int64 numbers by `all_reduce`.

*Forward*: each replica sends 2C + 1 numbers: the mean and variance of its own elements in each
channel, and the number of its elements per channel. Each replica writes its numbers to its own row
of a matrix of zeros. The sum of all matrices, computed by one `all_reduce`, has the rows of all
replicas. Each element of this sum has one term that a replica has written, and all its other terms
are 0, so the sum is not rounded. The rows are combined by the formula for parallel variances (Chan,
Golub and LeVeque, 1979). The formula loses no digits, even if the means are much larger than the
standard deviations. (In this case, variances that are computed from sums of squares would lose
digits by cancellation.) The rows are in the order of the replicas, so all replicas get the same
bits.

*Backward*: each replica sends the two sums of each channel, and `all_reduce` adds up those of all
replicas. The number of elements is known from the forward pass.

*Reproducible sums* are exchanged as integers. A channel has two sums. Each sum has a top
bin and three digits (four digits for float64 elements). With the number of elements, these are 8C +
1 numbers (10C + 1 for float64 elements). In both passes, each replica writes its integers to its
own row of a matrix of zeros, and `all_reduce` gives every replica all rows. Each replica then adds
up the rows itself. (Replicas with the same top bins could add up digits by `all_reduce`. But to
find the largest top bin, `all_reduce` would have to compute maxima, which it cannot do.)

In every distribution strategy, `all_reduce` has a gradient and can be called eagerly, in graphs and
under XLA. (`all_gather` is not available if XLA compiles replicas on GPUs.)
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from backnorm.errors import BacknormError
from backnorm.reproducible_sums import bin_rows
from backnorm.tensorflow import calls, formulas
from backnorm.tensorflow.calls import Options
from backnorm.tensorflow.modes import has_tangent, is_for_xla
from backnorm.tensorflow.nodes import Node, compute, here, pick, place, refused

_ONCE = (
    "backnorm: batch normalisation over several replicas is differentiable once, not twice; use "
    "synchronized=False, or keras.layers.BatchNormalization"
)


class _Saved(NamedTuple):
    """The tensors from which a backward pass computes the gradients.

    Attributes
    ----------
    exact, count : tf.Tensor, optional
        The variance in float64, and the number of elements per channel of all replicas; absent for
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
    """Return y of this replica's part of the batch, and the mean and variance of the whole batch.
    Only y has a gradient.

    Parameters
    ----------
    statistics : tf.DType or None
        Type of mean and variance; not used in an eager call.
    replica : tf.distribute.ReplicaContext
        The context of a strategy with more than one replica.
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
        y, *found = _normalised(x, gamma, beta, options, statistics, replica)
        # Otherwise, a tape would differentiate these results, which have no gradient, after
        # `_of_backward` has refused to be differentiated.
        mean, variance, *whole = map(tf.stop_gradient, found)

        # `of_statistics` are the cotangents of the outputs mean and variance. They are zero,
        # because these two outputs pass through `tf.stop_gradient` below.
        def gradient(dy: Any, *of_statistics: Any) -> Any:
            # A cotangent may be tf.IndexedSlices, for example from tf.gather.
            dy = tf.convert_to_tensor(dy)
            saved = _Saved(x, dy, mean, variance, gamma, *whole)
            dx, dgamma, dbeta = _backward(saved, options, replica)
            return [dx, *pick([dgamma, dbeta], presence)]

        return (y, mean, variance), gradient

    y, mean, variance = tf.custom_gradient(operation)(x, *pick([gamma, beta], presence))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _backward(saved: _Saved, options: Options, replica: Any) -> tuple[Any, ...]:
    """Return the results of `_gradients`. Computing their gradients raises an error."""
    presence = [tensor is not None for tensor in saved]

    def operation(*present: Any) -> Any:
        tensors = _Saved(*here(place(present, presence)))

        def of_saved(*cotangents: Any) -> Any:
            dense = list(map(tf.convert_to_tensor, cotangents))
            return pick(_of_backward(tensors, (), dense, options), presence)

        return _gradients(tensors, options, replica), of_saved

    return tuple(tf.custom_gradient(operation)(*pick(saved, presence)))


def _normalised(
    x: Any, gamma: Any, beta: Any, options: Options, statistics: Any, replica: Any
) -> list[Any]:
    """Return y of this replica's part of the batch, and the mean and variance of the whole batch.

    If sums are not reproducible, also return two tensors of all replicas: the variance in float64,
    and the number of elements per channel (`exact` and `count` of `_Saved`).
    """
    own = compute(_reduction("batch_norm_moments", calls.moments, x, options), [x], options)
    saved: list[Any] = []
    if options.reproducible:
        whole = [bins_of_all(own[0], x, replica)]
    else:
        mean, exact, count = moments_of_all(own[0], own[1], x, replica)
        whole, saved = [mean, exact], [exact, count]
    node = Node("batch_norm_apply_moments", calls.apply_moments, [x], [statistics] * 2)
    return compute(node, [x, gamma, beta, *whole], options) + saved


def _gradients(saved: _Saved, options: Options, replica: Any) -> tuple[Any, ...]:
    """Return dx, dgamma and dbeta of this replica's part of the batch.

    If sums are reproducible, the first replica returns dgamma and dbeta of the whole batch, and
    every other replica returns zeros for them.
    """
    x, dy, mean, *_, exact, count = saved
    reduction = _reduction("batch_norm_sums", calls.sums, x, options)
    own = compute(reduction, [x, dy, mean], options)
    name, call = "batch_norm_apply_sums", calls.apply_sums
    if options.reproducible:
        operands = [*saved[:5], bins_of_all(own[0], x, replica)]
        dx, *totals = compute(Node(name, call, [x], [mean.dtype] * 2), operands, options)
        is_first = tf.equal(replica.replica_id_in_sync_group, 0)
        return (dx, *(tf.where(is_first, total, tf.zeros_like(total)) for total in totals))
    dbeta, sum_dy_xmu = own
    operands = [*saved[:5], *sums_of_all(dbeta, sum_dy_xmu, replica), count]
    (dx,) = compute(Node(name, call, [x]), operands, options)
    dgamma = sum_dy_xmu / tf.sqrt(exact + options.epsilon)
    return (dx, *(tf.cast(gradient, mean.dtype) for gradient in (dgamma, dbeta)))


def _reduction(name: str, call: Any, x: Any, options: Options) -> Node:
    """Return the node that computes the statistics, or the sums of the backward pass, of this
    replica's part of the batch. The node's results are two float64 values per channel, or bins if
    sums are reproducible.
    """
    if options.reproducible:
        return Node(name, call, [], [tf.int64], rows=(bin_rows(x.dtype.size),))
    return Node(name, call, [], [tf.float64] * 2)


def _of_backward(operands: Any, _: Any, cotangents: Any, options: Options) -> Any:
    return refused(operands, cotangents, options, _ONCE, _of_backward)


def moments_of_all(mean: Any, variance: Any, x: Any, replica: Any) -> tuple[Any, Any, Any]:
    """Return mean, variance and number of elements per channel of the whole batch.

    Parameters
    ----------
    mean, variance : tf.Tensor, float64, shape (C,)
        Mean and biased variance of this replica's elements; 0 if it has none.
    x : tf.Tensor
        This replica's elements, which are counted.
    replica : tf.distribute.ReplicaContext
    """
    channels, elements = (tf.cast(tf.size(each), tf.float64) for each in (mean, x))
    own = tf.concat([mean, variance, [tf.math.divide_no_nan(elements, channels)]], 0)
    rows = _rows(own, replica)
    means, variances = tf.split(rows[:, :-1], 2, axis=1)
    counts = rows[:, -1:]
    count = tf.reduce_sum(counts)
    shares = counts / tf.maximum(count, 1.0)
    mean = tf.reduce_sum(shares * means, 0)
    apart = means - mean
    return mean, tf.reduce_sum(shares * (variances + apart * apart), 0), count


def sums_of_all(sum_dy: Any, sum_dy_xmu: Any, replica: Any) -> Any:
    """Return sum(dy) and sum(dy * (x - mean)) over the elements of all replicas.

    The arguments are the two sums over this replica's elements, each float64 of shape (C,).
    """
    return tf.unstack(_sum(tf.stack([sum_dy, sum_dy_xmu]), replica))


def bins_of_all(bins: Any, x: Any, replica: Any) -> Any:
    """Return a matrix with one row for each replica.

    A row has the bins of the replica, flattened, and then the number of elements that the replica
    has in a channel.

    Parameters
    ----------
    bins : tf.Tensor, int64, shape (rows, C)
        The bins of this replica's elements.
    x, replica
        As in `moments_of_all`.
    """
    channels, elements = tf.shape(bins, tf.int64)[1], tf.size(x, tf.int64)
    own = tf.concat([tf.reshape(bins, [-1]), [elements // tf.maximum(channels, 1)]], 0)
    return _rows(own, replica)


def _rows(own: Any, replica: Any) -> Any:
    """Return a matrix with the numbers of all replicas: row k has those of the replica k."""
    place, size = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    return _sum(tf.scatter_nd([[place]], own[tf.newaxis], [size, tf.size(own)]), replica)


def _sum(tensor: Any, replica: Any) -> Any:
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, tensor)
