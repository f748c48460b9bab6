"""What the replicas of a strategy tell each other, by `all_reduce`: float64, or int64 numbers.

*Forward*: mean and variance of each replica's own elements, and their number, 2C + 1 numbers. Each
puts them into a row of its own among zeros, and the sum of all has everybody's rows: one message,
in which nothing is rounded. They are combined by the formula for parallel variances (Chan, Golub
and LeVeque, 1979), which loses no digits whatever the means; sums of squares would lose all of
them. The rows are in the order of replicas, so that all have the same bits.

*Backward*: one sum of 2C numbers; how many elements there are is known from the forward pass.

*Reproducible sums* are integers, with the bins that they count in (`binned`), and the number of
elements: 8C + 1 numbers, or 10C + 1 of float64 elements. They are told in rows each way, so that a
message has as many as there are replicas: `all_reduce` has no maximum, by which top bins could be
agreed on before one sum. Each replica adds up the rows of all.

`all_reduce`, because it is what a strategy has everywhere: eagerly, in graphs, and for XLA, with a
gradient. (`all_gather` is not to be had where XLA compiles replicas on GPUs.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["bins_of_all", "moments_of_all", "sums_of_all"]


def moments_of_all(mean: Any, variance: Any, x: Any, replica: Any) -> tuple[Any, Any, Any]:
    """Return mean, variance and number of elements of a channel of all replicas' elements.

    Parameters
    ----------
    mean, variance : tf.Tensor, float64, shape (C,)
        Of this replica's elements, the variance being the biased one; 0 without any.
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


def sums_of_all(one: Any, other: Any, replica: Any) -> Any:
    """Return the sums of all replicas of what each has two sums of, float64, of shape (C,)."""
    return tf.unstack(_sum(tf.stack([one, other]), replica))


def bins_of_all(bins: Any, x: Any, replica: Any) -> Any:
    """Return a row of each replica: its bins, flat, and its number of elements of a channel.

    Parameters
    ----------
    bins : tf.Tensor, int64, shape (rows, C)
        Of this replica's elements.
    x, replica
        As of `moments_of_all`.
    """
    channels, elements = tf.shape(bins, tf.int64)[1], tf.size(x, tf.int64)
    own = tf.concat([tf.reshape(bins, [-1]), [elements // tf.maximum(channels, 1)]], 0)
    return _rows(own, replica)


def _rows(own: Any, replica: Any) -> Any:
    """Return what each replica has of some numbers, in a row for each, in their order."""
    place, size = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    return _sum(tf.scatter_nd([[place]], own[tf.newaxis], [size, tf.size(own)]), replica)


def _sum(tensor: Any, replica: Any) -> Any:
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, tensor)
