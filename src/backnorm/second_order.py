"""The second order: gradients of the backward pass itself (a front door and its execution).

The sums over channels are those of the engine (:func:`backnorm.reduce`); what is done to the
elements is NumPy in float64, a block at a time, so that memory beyond the results is a few blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from backnorm import execute
from backnorm.dtypes import FLOAT32, is_16_bit
from backnorm.layout import Extents, Order, extents_of, in_order, memory_order, restore
from backnorm.operators import reduce
from backnorm.problem import Problem, as_array, backward_problem, variance_error
from backnorm.results import SecondGradients

__all__ = ["batch_norm_double_backward"]

# Elements in a block: the half dozen float64 blocks of an expression stay in the second-level
# cache, and one is long enough to hide what a NumPy call costs.
_BLOCK = 1 << 15

_Floats = npt.NDArray[np.float64]
_Cell = tuple[slice, slice, slice]


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
    data_format: str = "NCX",
    training: bool = True,
) -> SecondGradients:
    r"""Return the gradients of batch normalisation's backward pass.

    They are those of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta> with respect to x, dy and
    gamma, where dx, dgamma and dbeta are what `batch_norm_backward` returns. With M elements per
    channel, s = 1/sqrt(variance + epsilon) and h = (x - mean)*s, in training::

        R = sum ddx*dy - sum(ddx)*sum(dy)/M,  P = sum ddx*h,  Q = sum dy*h
        x     = gamma*s**2/M * (h*(3*P*Q/M - R) - P*(dy - sum(dy)/M) - Q*(ddx - sum(ddx)/M))
                + ddgamma*s * (dy - sum(dy)/M - h*Q/M)
        dy    = gamma*s * (ddx - sum(ddx)/M - h*P/M) + ddgamma*h + ddbeta
        gamma = s * (R - P*Q/M)

    and with frozen statistics::

        x     = ddgamma*s*dy
        dy    = gamma*s*ddx + ddgamma*h + ddbeta
        gamma = s * sum ddx*dy

    Parameters
    ----------
    x, dy, mean, variance, gamma
        As in `batch_norm_backward`.
    ddx : array, optional
        Gradient with respect to dx, of x's shape and type; absent, zero.
    ddgamma, ddbeta : array, shape (C,), optional
        Gradients with respect to dgamma and dbeta, of mean's type; absent, zero.
    epsilon : float
        Added to the variance; finite and not negative.
    data_format : {"NCX", "NXC"}
        Channel axis 1, or last.
    training : bool
        True: mean and variance are functions of x (1/M and 2*(x - mean)/M are their derivatives).
        False: they are constants.

    Returns
    -------
    SecondGradients
        x and dy of x's shape, type and memory order; gamma, (C,), of mean's type. A cotangent that
        is absent adds no term, so NaN does not spread through it.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `batch_norm_backward`, for every argument.
    """
    x, dy = as_array("x", x), as_array("dy", dy)
    mean, variance = as_array("mean", mean), as_array("variance", variance)
    gamma, ddx, ddgamma, ddbeta = (
        None if value is None else as_array(name, value)
        for name, value in (
            ("gamma", gamma), ("ddx", ddx), ("ddgamma", ddgamma), ("ddbeta", ddbeta),
        )
    )  # fmt: skip
    problem = backward_problem(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )
    # The cotangents have the shapes and types of dx, dgamma and dbeta, which are those of dy and
    # gamma: the same checks in other words.
    for name, value in (("ddgamma", ddgamma), ("ddbeta", ddbeta)):
        backward_problem(
            x,
            dy if ddx is None else ddx,
            mean,
            variance,
            value,
            epsilon=epsilon,
            data_format=data_format,
            training=training,
            words={"dy": "ddx", "gamma": name},
        )
    tensors = _Tensors.of(problem, x, dy, ddx)
    compute = _training if problem.training else _frozen
    with np.errstate(all="ignore"):
        channels = _Channels.of(problem, mean, variance, gamma, ddgamma, ddbeta)
        return compute(problem, tensors, channels, data_format)


class _Tensors(NamedTuple):
    """x, dy and ddx, dense in one order of axes."""

    order: Order
    extents: Extents
    x: np.ndarray
    dy: np.ndarray
    ddx: np.ndarray | None

    @classmethod
    def of(
        cls, problem: Problem, x: np.ndarray, dy: np.ndarray, ddx: np.ndarray | None
    ) -> _Tensors:
        order = memory_order(x)
        extents = extents_of(problem.shape, problem.channel_axis, order)
        return cls(
            order,
            extents,
            in_order(x, order, problem.dtype),
            in_order(dy, order, problem.dtype),
            None if ddx is None else in_order(ddx, order, problem.dtype),
        )

    def fresh(self) -> np.ndarray:
        """Return a new tensor like x."""
        return execute.allocate(self.x.shape, self.x.dtype)

    def cell(self, tensor: np.ndarray, cell: _Cell) -> np.ndarray:
        """Return a block of a tensor, shape (outer, channels, inner)."""
        return tensor.reshape(self.extents)[cell]

    def sums(
        self, left: np.ndarray, right: np.ndarray, mean: np.ndarray, data_format: str
    ) -> tuple[_Floats, _Floats]:
        """Return sum(right) and sum(right * (left - mean)) of each channel."""
        restored = restore(left, self.order), restore(right, self.order)
        sums = reduce(*restored, mean, data_format=data_format)
        return sums.sum_dy, sums.sum_dy_xmu


class _Channels(NamedTuple):
    """Values per channel in float64; s is 1/sqrt(variance + epsilon)."""

    stored_mean: np.ndarray
    mean: _Floats
    s: _Floats
    gamma: _Floats
    ddgamma: _Floats | None
    ddbeta: _Floats | None

    @classmethod
    def of(
        cls,
        problem: Problem,
        mean: np.ndarray,
        variance: np.ndarray,
        gamma: np.ndarray | None,
        ddgamma: np.ndarray | None,
        ddbeta: np.ndarray | None,
    ) -> _Channels:
        total = variance.astype(np.float64) + problem.epsilon
        refused = np.flatnonzero(np.isfinite(total) & (total <= 0))
        if refused.size:
            raise variance_error(variance, problem.epsilon, int(refused[0]))
        return cls(
            mean,
            mean.astype(np.float64),
            1.0 / np.sqrt(total),
            np.ones(problem.channels) if gamma is None else gamma.astype(np.float64),
            None if ddgamma is None else ddgamma.astype(np.float64),
            None if ddbeta is None else ddbeta.astype(np.float64),
        )


class _Line(NamedTuple):
    """Coefficients, per channel, of the terms of an element; None where there is no such term."""

    h: _Floats | None = None
    dy: _Floats | None = None
    ddx: _Floats | None = None
    constant: _Floats | None = None


def _training(
    problem: Problem, tensors: _Tensors, channels: _Channels, data_format: str
) -> SecondGradients:
    count = float(max(problem.count, 1))
    s, gamma, ddgamma = channels.s, channels.gamma, channels.ddgamma
    zeros = np.zeros(problem.channels)
    mean_dy, mean_ddx, result = zeros, zeros, zeros
    along_x, along_dy = _Line(), _Line(constant=channels.ddbeta)
    if tensors.ddx is not None or ddgamma is not None:
        sum_dy, sum_dy_xmu = tensors.sums(tensors.x, tensors.dy, channels.stored_mean, data_format)
        mean_dy, q = sum_dy / count, s * sum_dy_xmu
        if ddgamma is not None:
            along_x = _Line(h=-ddgamma * s * q / count, dy=ddgamma * s)
            along_dy = along_dy._replace(h=ddgamma)
    if tensors.ddx is not None:
        sum_ddx, sum_ddx_xmu = tensors.sums(
            tensors.x, tensors.ddx, channels.stored_mean, data_format
        )
        mean_ddx, p = sum_ddx / count, s * sum_ddx_xmu
        # The covariance of dy and ddx, about a number next to the mean of dy: no cancellation.
        pivot = mean_dy.astype(FLOAT32 if is_16_bit(problem.dtype) else problem.dtype)
        _, about_pivot = tensors.sums(tensors.dy, tensors.ddx, pivot, data_format)
        r = about_pivot - (mean_dy - pivot) * sum_ddx
        scale = gamma * s * s / count
        along_x = _plus(along_x, _Line(scale * (3.0 * p * q / count - r), -scale * p, -scale * q))
        along_dy = _plus(along_dy, _Line(h=-gamma * s * p / count, ddx=gamma * s))
        result = s * (r - p * q / count)
    return SecondGradients(
        _evaluate(along_x, tensors, channels, mean_dy, mean_ddx),
        _evaluate(along_dy, tensors, channels, mean_dy, mean_ddx),
        _per_channel(result, channels),
    )


def _frozen(
    problem: Problem, tensors: _Tensors, channels: _Channels, data_format: str
) -> SecondGradients:
    s, gamma, ddgamma = channels.s, channels.gamma, channels.ddgamma
    zeros = np.zeros(problem.channels)
    along_x, along_dy, result = _Line(), _Line(h=ddgamma, constant=channels.ddbeta), zeros
    if ddgamma is not None:
        along_x = _Line(dy=ddgamma * s)
    if tensors.ddx is not None:
        along_dy = along_dy._replace(ddx=gamma * s)
        nothing = zeros.astype(channels.stored_mean.dtype)
        result = s * tensors.sums(tensors.dy, tensors.ddx, nothing, data_format)[1]
    return SecondGradients(
        _evaluate(along_x, tensors, channels, zeros, zeros),
        _evaluate(along_dy, tensors, channels, zeros, zeros),
        _per_channel(result, channels),
    )


def _plus(one: _Line, other: _Line) -> _Line:
    """Return the sum of two lines, coefficient by coefficient."""
    return _Line(
        *(a if b is None else b if a is None else a + b for a, b in zip(one, other, strict=True))
    )


def _evaluate(
    line: _Line, tensors: _Tensors, channels: _Channels, mean_dy: _Floats, mean_ddx: _Floats
) -> np.ndarray:
    """Return h*a + (dy - mean_dy)*b + (ddx - mean_ddx)*c + d, in x's order, rounded once."""
    result = tensors.fresh()
    for cell in _cells(tensors.extents):
        part = cell[1]
        value = np.zeros(())
        if line.h is not None:
            c = tensors.cell(tensors.x, cell).astype(np.float64) - _column(channels.mean, part)
            value = c * _column(channels.s, part) * _column(line.h, part)
        if line.dy is not None:
            d = tensors.cell(tensors.dy, cell).astype(np.float64) - _column(mean_dy, part)
            value = value + d * _column(line.dy, part)
        if line.ddx is not None and tensors.ddx is not None:
            d = tensors.cell(tensors.ddx, cell).astype(np.float64) - _column(mean_ddx, part)
            value = value + d * _column(line.ddx, part)
        if line.constant is not None:
            value = value + _column(line.constant, part)
        tensors.cell(result, cell)[...] = value
    return restore(result, tensors.order)


def _per_channel(values: _Floats, channels: _Channels) -> np.ndarray:
    result = execute.allocate(values.shape, channels.stored_mean.dtype.newbyteorder("="))
    result[...] = values
    return result


def _cells(extents: Extents) -> Iterator[_Cell]:
    """Yield blocks (outer, channels, inner) that together cover a tensor."""
    inner_step = max(1, min(extents.inner, _BLOCK))
    channel_step = max(1, min(extents.channels, _BLOCK // inner_step))
    outer_step = max(1, _BLOCK // (inner_step * channel_step))
    for outer in range(0, extents.outer, outer_step):
        for channel in range(0, extents.channels, channel_step):
            for inner in range(0, extents.inner, inner_step):
                yield (
                    slice(outer, outer + outer_step),
                    slice(channel, channel + channel_step),
                    slice(inner, inner + inner_step),
                )


def _column(values: _Floats, part: slice) -> _Floats:
    return values[part, None]
