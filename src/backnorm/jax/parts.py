"""Combine the statistics and sums of the parts of a batch that is split over devices.

`PARTS` has two functions, for the forward and the backward pass, by which a device computes the
results for its part of the batch. On each device, a kernel sums up the device's part. The devices
exchange these sums, and another kernel computes the results from the sums of all parts. Sums are
float64 (reproducible sums are int64), even if JAX's setting `jax_enable_x64` does not enable 64-bit
types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from backnorm.jax import ffi
from backnorm.jax.batching import batch_size
from backnorm.jax.differentiable import Arrays
from backnorm.jax.problems import Options
from backnorm.jax.varying import alike
from backnorm.reproducible_sums import bin_rows, raised, tops_of, with_tops
from backnorm.signature import Operation

#: Arguments of `jax.lax.psum`: the mapped axes that the batch is split over (`axis_name`), and the
#: groups of devices that sum up together (`axis_index_groups`).
Groups = dict[str, Any]


def moments_of_all(
    mean: jax.Array, variance: jax.Array, count: jax.Array | None, groups: Groups
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Return mean, variance and number of elements of all parts, given those of this part.

    Sums of x and of its square are not used, because they would lose digits by cancellation. If all
    parts have the same number of elements, `count` may be None; the returned number is then None,
    too.

    References
    ----------
    Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances", 1979.
    """
    of_all: Callable[[jax.Array], jax.Array] = partial(jax.lax.pmean, **groups)
    total = weight = None
    if count is not None:
        total = jax.lax.psum(count, **groups)
        weight = count / alike(jnp.maximum(total, 1), count)[0]
        of_all = partial(jax.lax.psum, **groups)

    def weighed(values: jax.Array) -> jax.Array:
        return values if weight is None else weight * values

    whole = of_all(weighed(mean))
    apart = mean - alike(whole, mean)[0]
    return whole, of_all(weighed(variance + apart * apart)), total


def _forward(*operands: jax.Array, options: Options, groups: Groups) -> Arrays:
    sums = _sums("reduce_forward", operands[:1], options, groups, _whole_moments)
    return _finished("apply_forward", (*operands, sums), (0, 1, 1), options, groups)


def _backward(*operands: jax.Array, options: Options, groups: Groups) -> Arrays:
    sums = _sums("reduce", operands[:3], options, groups, _whole_sums)
    return _finished("apply_backward", (*operands, sums), (1, 4, 4), options, groups)


def _sums(
    operation: Operation,
    operands: Arrays,
    options: Options,
    groups: Groups,
    whole: Callable[[jax.Array, Groups], jax.Array],
) -> jax.Array:
    """Return the sums of all parts, of shape (batch, rows, C). Each problem of the batch has two
    rows, or, with reproducible sums, the rows of the two sums' bins.
    """
    x, dtype, rows = operands[0], jnp.float64, 2
    if options.reproducible:
        dtype, rows, whole = jnp.int64, bin_rows(x.dtype.itemsize), _whole_bins
    shape = (batch_size(operands), rows, x.shape[1 + options.axis])
    (own,) = ffi.call(operation, operands, [jax.ShapeDtypeStruct(shape, dtype)], options)
    return whole(own, groups)


def _finished(
    operation: Operation,
    operands: Arrays,
    like: tuple[int, ...],
    options: Options,
    groups: Groups,
) -> Arrays:
    """Return the results for this device's part of the batch. For each result, `like` has the index
    of an operand that has the result's shape and type.
    """
    parts, results = len(groups["axis_index_groups"][0]), [operands[k] for k in like]
    return tuple(ffi.call(operation, operands, results, options, parts=parts))


def _whole_moments(own: jax.Array, groups: Groups) -> jax.Array:
    mean, variance, _ = moments_of_all(own[:, 0], own[:, 1], None, groups)
    return jnp.stack((mean, variance), axis=1)


def _whole_sums(own: jax.Array, groups: Groups) -> jax.Array:
    whole: jax.Array = jax.lax.psum(own, **groups)
    return whole


def _whole_bins(own: jax.Array, groups: Groups) -> jax.Array:
    """Return the bins of all parts' sums, shape (`jax.vmap`'s batch, rows, C)."""
    bins = jnp.moveaxis(own, 1, 0)
    tops = jax.lax.pmax(tops_of(bins), **groups)
    total = jax.lax.psum(raised(bins, tops, jnp), **groups)
    return jnp.moveaxis(with_tops(total, tops, jnp), 0, 1)


def _with_64_bits(function: Callable[..., Arrays]) -> Callable[..., Arrays]:
    def computed(*operands: jax.Array, options: Options, groups: Groups) -> Arrays:
        with jax.enable_x64(True):
            return function(*operands, options=options, groups=groups)

    return computed


#: Maps an operation to the function that computes it for the part of a batch on one device.
PARTS = {"forward": _with_64_bits(_forward), "backward": _with_64_bits(_backward)}
