"""Results of a backward pass blended into the outputs: alpha * result + beta * output.

The sums are those of the engine. What is done to the elements is NumPy in float64, a block at a
time, and rounded once; so a float64 result has the roundings of this arithmetic, five at the most,
beside those of the budget.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from backnorm.aliasing import check_memory, check_out, own
from backnorm.arrays import NUMPY
from backnorm.dtypes import rounded
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.executable import executable
from backnorm.layout import in_order
from backnorm.problem import Problem, variance_error
from backnorm.results import Blend, ChannelSums, Gradients
from backnorm.signature import SIGNATURES

__all__ = ["backward"]

# Elements in a block: its half dozen float64 arrays stay in the second-level cache.
_BLOCK = 1 << 15

_BACKWARD = SIGNATURES["backward"]


def backward(problem: Problem, operands: Sequence[Any], out: Any, blend: Blend) -> Gradients:
    """Return dx, dgamma and dbeta, in the arrays of `out` where those are given.

    Parameters
    ----------
    problem : Problem
        Of a backward pass without a ReLU.
    operands : sequence of arrays
        Those of the signature.
    out : tuple of (numpy.ndarray or None)
        Arrays for dx, dgamma and dbeta; one that is blended must be there. dx may be dy.
    blend : Blend

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
    """
    if problem.relu:
        raise ArgumentValueError(
            "blend", "comes without a ReLU", came="a mask", accepted="no mask, or no blend"
        )
    outputs = _checked(problem, operands, out, blend)
    x, dy, _, mean, variance, gamma = operands
    known = problem.shape, problem.channel_axes, problem.dtype, problem.statistics_dtype
    reduction = Problem("reduce", *known, arithmetic=problem.arithmetic)
    whole = executable(reduction, x, exchanged=True)
    (sum_dy, sum_dy_xmu), count = whole.run(x, dy, None, mean)
    sums = ChannelSums(sum_dy, sum_dy_xmu, count)
    total = variance.astype(np.float64)
    with np.errstate(all="ignore"):
        # As in a kernel, an infinite one makes no NaN of differences of zero.
        inverse = np.minimum(total, 1e150)
        s = inverse if problem.inverse else 1.0 / np.sqrt(total + problem.epsilon)
        scale = s if gamma is None else gamma.astype(np.float64) * s
        _refuse(problem, variance, total)
        _elements(whole, problem, (x, dy, mean), sums, s, scale, outputs[0], blend.data)
        gradients = (s * sums.sum_dy_xmu, sums.sum_dy)
        for array, value in zip(outputs[1:], gradients, strict=True):
            array[...] = rounded(_blended(value, array, blend.channels), array.dtype)
    # Arrays of the caller are returned as they came, of their own class.
    pairs = zip(outputs, out, strict=True)
    return Gradients(*(new if array is None else array for new, array in pairs))


def _checked(problem: Problem, operands: Sequence[Any], out: Any, blend: Blend) -> list[np.ndarray]:
    """Return the arrays to blend into: those of `out`, and new ones for None."""
    names, shares = ("dx", "dgamma", "dbeta"), (blend.data, blend.channels, blend.channels)
    if not isinstance(out, tuple) or len(out) != len(names):
        raise ArgumentTypeError(
            "out", "must be what is blended into", came=type(out).__name__,
            accepted="a tuple of arrays (or None) for dx, dgamma and dbeta",
        )  # fmt: skip
    for name, array, (_, beta) in zip(names, out, shares, strict=True):
        if array is None and beta != 0.0:
            raise ArgumentValueError(
                "out", f"holds no {name}, into which the result is to be blended",
                came=f"None with beta {beta}", accepted="an array, or beta 0",
            )  # fmt: skip
    dx, *channels = (None if array is None else own(array) for array in out)
    if dx is None:
        dx = NUMPY.new(problem, tuple(range(len(problem.shape))))
    else:
        check_out(problem, operands, dx)
    outputs = [dx]
    for array in channels:
        if array is None:
            array = np.empty(problem.channels, problem.statistics_dtype)
        else:
            check_memory(array, (problem.channels,), problem.statistics_dtype, like="mean")
            operand_names = (f"{{{name}}}" for name in _BACKWARD.names)
            named = zip((*operand_names, *names), (*operands, *outputs), strict=False)
            for name, memory in named:
                if memory is not None and np.may_share_memory(array, memory):
                    raise ArgumentValueError(
                        "out", f"its {names[len(outputs)]} overlaps {name} in memory",
                        accepted="separate memory for dgamma and dbeta",
                    )  # fmt: skip
        outputs.append(array)
    return outputs


def _refuse(problem: Problem, variance: np.ndarray, total: np.ndarray) -> None:
    wide = total + problem.epsilon
    refused = total < 0 if problem.inverse else np.isfinite(wide) & (wide <= 0)
    (channels,) = np.nonzero(refused)
    if channels.size:
        raise variance_error(variance, problem, int(channels[0]))


def _elements(
    whole: Any,
    problem: Problem,
    operands: tuple[Any, ...],
    sums: Any,
    s: np.ndarray,
    scale: np.ndarray,
    out: np.ndarray,
    shares: tuple[float, float],
) -> None:
    """Blend dx into `out`, a block at a time."""
    x, dy, mean = operands
    extents = whole.plan.extents
    flat = [in_order(array, whole.order, problem.dtype).reshape(extents) for array in (x, dy)]
    # Written to as it is; where it lies in another order it is a copy, which goes back at the end.
    moved = out.transpose(whole.order)
    target = moved.reshape(extents)
    count = max(1, sums.count)
    shift = sums.sum_dy / count if problem.training else np.zeros_like(s)
    slope = s * (s * sums.sum_dy_xmu / count) if problem.training else np.zeros_like(s)
    centre = mean.astype(np.float64)
    at, moved_by, by_x, gain = (each[:, None] for each in (centre, shift, slope, scale))
    inner = max(1, min(extents.inner, _BLOCK // max(1, extents.channels)))
    outer = max(1, _BLOCK // max(1, extents.channels * inner))
    starts = itertools.product(range(0, extents.outer, outer), range(0, extents.inner, inner))
    for n, k in starts:
        part = slice(n, n + outer), slice(None), slice(k, k + inner)
        value = flat[1][part].astype(np.float64) - moved_by
        if problem.training:
            value -= (flat[0][part].astype(np.float64) - at) * by_x
        target[part] = rounded(_blended(gain * value, target[part], shares), target.dtype)
    if not np.may_share_memory(target, out):
        moved[...] = target.reshape(moved.shape)


def _blended(value: Any, output: np.ndarray, shares: tuple[float, float]) -> Any:
    """Return alpha * value + beta * output, whose elements are not read if beta is 0."""
    alpha, beta = shares
    return alpha * value if beta == 0.0 else alpha * value + beta * output.astype(np.float64)
