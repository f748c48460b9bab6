"""Weights of elements: those from which statistics are computed, and how often each counts.

With the weights w of a channel's elements (1 and 0 if they are booleans), and W = sum(w)::

    mean = sum(w * x) / W,  var = sum(w * (x - mean)**2) / W,  y = gamma * s * (x - mean) + beta

where s = 1 / sqrt(var + epsilon). y is computed for all elements, so all have gradients::

    dbeta = sum(dy)
    dgamma = s * sum(dy * (x - mean))
    dx = gamma * s * (dy - w / W * (dbeta + s * (x - mean) * dgamma))

W takes the place of the number of elements, also in an unbiased variance. The first functions serve
NumPy and PyTorch, whose namespace is `xp`. There, weights have x's shape with 1 in place of
channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from backnorm.arrays import NUMPY
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.executable import compute
from backnorm.interfaces import Operands, Results
from backnorm.layout import adjacent, in_order, memory_order, restore
from backnorm.options import Options
from backnorm.problem import Problem
from backnorm.reproducible_sums import moments_of, sums_of
from backnorm.scalars import as_array

# An array of NumPy or PyTorch.
Array = Any

# The sum of the weights of a channel must be less: it is passed where the number of elements is.
_MOST = 2.0**63


def moments(
    sums: Callable[[Array, Array, Any], Any], x: Array, weights: Array
) -> tuple[Array, Array, Array, Array]:
    """Return x - mean; and mean, biased variance and sum of weights of every channel, in shapes
    that broadcast with x.

    x and weights are float64 arrays of one shape. `sums` takes two such arrays, left and right, and
    a pivot. It returns sum(right) and sum(right * (left - pivot)) of every channel.
    """
    count, total = sums(x, weights, 0.0)
    near = total / count
    centred = x - near
    # The first sum would be 0 if `near` was not rounded.
    rest, square = sums(x, weights * centred, near)
    rest = rest / count
    return centred - rest, near + rest, square / count - rest * rest, count


def reduce_counted(
    x: Array,
    weights: Array | None,
    axes: tuple[int, ...],
    options: Options,
    reduce: Callable[..., Results],
    xp: Any,
) -> Results:
    """Return what the operation "reduce_forward" does for the counted elements; for all, if weights
    are None.

    Unless the weights are booleans, the last result is their sum, a float. `axes` are the channel
    axes. `reduce` takes an operation, operands and options.
    """
    if weights is None:
        return reduce("reduce_forward", (x,), options)
    last = tuple(range(-len(axes), 0))
    weights = xp.moveaxis(weights, axes, last)[(..., *[0] * len(axes))]
    counts = weights != 0
    counted = xp.moveaxis(x, axes, last)[counts]
    counted = counted.reshape(len(counted), math.prod(counted.shape[1:]))
    options = options._replace(data_format="NCX")
    if weights.dtype == xp.bool or not len(counted):
        return reduce("reduce_forward", (counted,), options)
    wide, column = (xp.asarray(each, dtype=xp.float64) for each in (counted, weights[counts]))

    def sums(left: Array, right: Array, pivot: Any) -> Array:
        operands = left, right, None, wide[:0].sum(0) + pivot
        return reduce("reduce", operands, options._replace(arithmetic="float64"))[0]

    _, mean, variance, count = moments(sums, wide, xp.broadcast_to(column[:, None], wide.shape))
    return xp.stack((mean, variance)), float(count[:1].sum())


def apply(run: Callable[[Array, bool], Results], dy: Array, weights: Array, xp: Any) -> Results:
    """Return what the operation "apply" does, with weights.

    `run` takes dy and `training`, and returns what "apply" does with the sums divided by W.
    """
    frozen, *others = run(dy, False)
    if weights.dtype == xp.bool:
        return xp.where(weights, run(dy, True)[0], frozen), *others
    # In place, because the memory of new arrays would take longer than the arithmetic.
    dx = run(xp.zeros_like(dy), True)[0]
    dx *= weights
    dx += frozen
    return dx, *others


def check_weights(name: str, weights: Array, xp: Any) -> None:
    """Raise if a weight is negative or NaN, or the sum of all is too large."""
    if not bool((weights >= 0.0).all()):
        raise ArgumentValueError(name, "must have no negative weight and no NaN")
    if not xp.sum(weights, dtype=xp.float64) < _MOST:
        raise ArgumentValueError(name, "must have weights whose sum is less than 2**63")


def forward(operands: Operands[Any], weights: Any, options: Options, out: Any) -> Results:
    """Return the results of the operation "forward" on NumPy arrays, with weights.

    The operands are x, residual, gamma and beta.
    """
    problem, (x, *_) = NUMPY.checked("apply_forward", operands, options)
    weights, _ = _read(weights, problem, options)
    with np.errstate(all="ignore"):
        axes = problem.channel_axes
        sums, count = reduce_counted(x, weights, axes, options, compute, np)
        if options.reproducible:
            sums = moments_of(sums, np.array([float(count)]), np)
    return compute("apply_forward", operands, options, out, sums=tuple(sums))


def backward(operands: Operands[Any], weights: Any, options: Options) -> Results:
    """Return the results of the operation "backward" on NumPy arrays, with weights."""
    problem, read = NUMPY.checked("backward", operands, options)
    weights, total = _read(weights, problem, options)
    if not problem.training:
        return compute("backward", operands, options)
    sums, _ = compute("reduce", operands[:4], options)
    x, dy, mask, *channels = cast("Sequence[Any]", read)
    # dx gets its order of axes from all operands of `numpy.where`.
    order = adjacent(problem.shape, problem.channel_axes, memory_order(x))
    weights = restore(in_order(weights, order, weights.dtype), order)
    with np.errstate(all="ignore"):
        dbeta, of_gamma = sums_of(sums, np) if options.reproducible else sums
        dgamma = of_gamma / np.sqrt(channels[1].astype(float) + problem.epsilon)
        if weights.dtype != bool:
            options = options._replace(arithmetic="float64")
            x, dy = x.astype(float), dy.astype(float)
            channels = [None if each is None else each.astype(float) for each in channels]
        shares = dbeta / total, of_gamma / total

        def run(dy: np.ndarray, training: bool) -> Results:
            own = x, dy, mask, *channels
            return compute("apply", own, options._replace(training=training), sums=shares, count=1)

        dx, dresidual = (
            None if each is None else each.astype(problem.dtype, copy=False)
            for each in apply(run, dy, weights, np)
        )
        of_channels = (each.astype(problem.statistics_dtype) for each in (dgamma, dbeta))
    return dx, *of_channels, dresidual


def _read(weights: Any, problem: Problem, options: Options) -> tuple[np.ndarray, float]:
    """Return the weights with all positions, and their sum; raise if x does not take them."""
    array = as_array("weights", weights)
    is_float = element_type(array.dtype) is not None
    if array.dtype != bool and (options.reproducible or not is_float):
        raise ArgumentTypeError(
            "weights", "unsupported element type", came=array.dtype,
            accepted="bool, or without reproducible=True a floating-point type",
        )  # fmt: skip
    sizes = enumerate(problem.shape)
    shape = tuple(1 if axis in problem.channel_axes else size for axis, size in sizes)
    if array.ndim != len(shape) or any(
        own not in (1, size) for own, size in zip(array.shape, shape, strict=True)
    ):
        raise ArgumentValueError(
            "weights", "must have the shape of {x} with 1 in place of channels",
            came=f"shape {array.shape}", accepted=f"shape {shape}, or 1 in place of a number",
        )  # fmt: skip
    with np.errstate(invalid="ignore"):
        check_weights("weights", array, np)
        array = np.broadcast_to(array, shape)
        total = float(array.sum(dtype=float))
    if not total and problem.size:
        raise ArgumentValueError("weights", "must count at least one element")
    return array, total
