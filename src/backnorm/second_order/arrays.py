"""Second-order gradients of NumPy arrays: the public function, and its sums.

The CPU kernels compute the sums of each channel (:func:`backnorm.reduce`). From these sums, NumPy
computes the elements in float64, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from backnorm.arithmetics import own_arithmetic
from backnorm.arrays import NUMPY
from backnorm.dtypes import FLOAT32, is_16_bit
from backnorm.layout import adjacent, extents_of, in_order, memory_order, restore
from backnorm.operators import reduce
from backnorm.options import Format, Options
from backnorm.problem import variance_error
from backnorm.results import SecondGradients
from backnorm.second_order import blocks
from backnorm.second_order.formulas import ABSENT, Array

# The arrays are computed in blocks of this number of elements. While a block is computed, about six
# float64 arrays of its size are in use. Together these arrays take 1.5 MiB, so they stay in a
# second-level cache of 2 MiB. A block is so large that NumPy takes much longer to compute its
# elements than to start a function.
_BLOCK = 1 << 15


def batch_norm_double_backward(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any = None,
    *,
    ddx: Any = None,
    ddgamma: Any = None,
    ddbeta: Any = None,
    epsilon: float,
    data_format: Format = "NCX",
    training: bool = True,
) -> SecondGradients:
    r"""Return the gradients of batch normalisation's backward pass.

    The returned arrays are the gradients of the number <ddx, dx> + <ddgamma, dgamma> + <ddbeta,
    dbeta> with respect to x, dy and gamma, where dx, dgamma and dbeta are the results of
    `batch_norm_backward`. With M elements per channel, s = 1/sqrt(variance + epsilon) and h = (x -
    mean)*s, in training::

        R = sum ddx*dy - sum(ddx)*sum(dy)/M,  P = sum ddx*h,  Q = sum dy*h
        x     = gamma*s**2/M * (h*(3*P*Q/M - R) - P*(dy - sum(dy)/M) - Q*(ddx - sum(ddx)/M))
                + ddgamma*s * (dy - sum(dy)/M - h*Q/M)
        dy    = gamma*s * (ddx - sum(ddx)/M - h*P/M) + ddgamma*h + ddbeta
        gamma = s * (R - P*Q/M)

    With frozen statistics, the gradients are::

        x     = ddgamma*s*dy
        dy    = gamma*s*ddx + ddgamma*h + ddbeta
        gamma = s * sum ddx*dy

    Parameters
    ----------
    x, dy, mean, variance, gamma
        As in `batch_norm_backward`.
    ddx : array, optional
        Gradient with respect to dx, of x's shape and type; zero if absent.
    ddgamma, ddbeta : array, shape (C,), optional
        Gradients with respect to dgamma and dbeta, of mean's type; zero if absent.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"} or tuple of int
        Channel axis 1, or last, or the channel axes: see `batch_norm_backward`.
    training : bool
        True: mean and variance are functions of x (1/M and 2*(x - mean)/M are their derivatives).
        False: they are constants.

    Returns
    -------
    SecondGradients
        x and dy of x's shape, type and memory order; gamma, (C,), of mean's type. An absent
        cotangent adds no terms; zeros would add terms that propagate NaN.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`, for every argument.

    Notes
    -----
    Errors are within `backnorm.conformance.judge.budget`. Besides the results, and copies of arrays
    whose order of axes is not x's, the function allocates some 2 MiB.
    """
    return double_backward(
        (x, dy, ddx),
        (mean, variance, gamma, ddgamma, ddbeta),
        epsilon=epsilon,
        data_format=data_format,
        training=training,
    )


def double_backward(
    elements: Sequence[Any],
    channels: Sequence[Any],
    *,
    epsilon: float,
    data_format: Format,
    training: bool,
    out: tuple[np.ndarray, np.ndarray] | None = None,
) -> SecondGradients:
    """Compute `batch_norm_double_backward`, writing the gradients of x and dy to `out`.

    `elements` are x, dy and ddx; `channels` are mean, variance, gamma, ddgamma and ddbeta. If `out`
    is given, x must have one channel axis and be dense in some order of its axes, and the arrays of
    `out` must be dense in the same order.
    """
    options = Options(epsilon, data_format, training)
    problem, read = NUMPY.checked("double_backward", (*elements, *channels), options)
    x, dy, ddx, mean, variance, gamma, ddgamma, ddbeta = cast("Sequence[Any]", read)
    total = variance.astype(np.float64) + problem.epsilon
    refused = np.flatnonzero(np.isfinite(total) & (total <= 0))
    if refused.size:
        raise variance_error(variance, problem, int(refused[0]))
    order = adjacent(problem.shape, problem.channel_axes, memory_order(x))
    extents = extents_of(problem.shape, problem.channel_axes, order)

    def flat(array: np.ndarray) -> np.ndarray:
        return in_order(array, order, problem.dtype).reshape(extents)

    if out is None:
        form = NUMPY.forms(problem, order)["data"]
        one, other = NUMPY.new((form, form), read)
        out = restore(one, order), restore(other, order)
    of_gamma = np.empty(problem.channels, problem.statistics_dtype)
    with np.errstate(all="ignore"):
        of_gamma[...] = blocks.double_backward(
            [flat(x), flat(dy), None if ddx is None else flat(ddx)],
            [mean, variance, gamma, ddgamma, ddbeta],
            epsilon=problem.epsilon,
            training=problem.training,
            reduce=_reduce,
            block=_BLOCK,
            results=[flat(each) for each in out],
        )
    return SecondGradients(*out, of_gamma)


def _reduce(left: np.ndarray, right: np.ndarray, pivot: Array) -> tuple[np.ndarray, np.ndarray]:
    """Return what `blocks.sums` returns, computed by the CPU kernels, which compensate sums.

    The kernels take a float32 pivot (for float64 data a float64), so `pivot` is rounded. So the
    kernels sum about the rounded pivot, and this function then converts the sums to sums about
    `pivot` itself.
    """
    dtype = FLOAT32 if is_16_bit(right.dtype) else right.dtype
    columns = np.zeros((right.shape[1], 1)) if pivot is ABSENT else pivot
    stored = columns.astype(dtype)
    sums = reduce(left, right, stored[:, 0], arithmetic=own_arithmetic(right.dtype))
    total = sums.sum_dy[:, None]
    return total, sums.sum_dy_xmu[:, None] - (columns - stored) * total
