"""What the replicas of a strategy tell each other, by `all_reduce`, in float64.

*Forward*: mean and variance of each replica's own elements, and their number, 2C + 1 numbers. Each
puts them into a row of its own among zeros, and the sum of all has everybody's rows: one message,
in which nothing is rounded. They are combined by the formula for parallel variances (Chan, Golub
and LeVeque, 1979), which loses no digits whatever the means; sums of squares would lose all of
them. The rows are in the order of replicas, so that all have the same bits.

*Backward*: one sum of 2C numbers; how many elements there are is known from the forward pass.

`all_reduce`, because it is what a strategy has everywhere: eagerly, in graphs, and for XLA, with a
gradient. (`all_gather` is not to be had where XLA compiles replicas on GPUs.)
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

__all__ = ["moments_of_all", "sums_of_all"]


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
    place, size = replica.replica_id_in_sync_group, replica.num_replicas_in_sync
    row = tf.scatter_nd([[place]], own[tf.newaxis], [size, tf.size(own)])
    rows = _sum(row, replica)
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


def _sum(tensor: Any, replica: Any) -> Any:
    return replica.all_reduce(tf.distribute.ReduceOp.SUM, tensor)
