"""The backward pass and its gradients, and passes with a mask, composed of PyTorch's operators.

PyTorch differentiates the compositions to any order, in reverse and forward mode, and for batched
gradients. The compositions replace the kernels where the kernels' results cannot be differentiated
as often as needed. Everything is computed in float64.

In training, mean and variance are functions of x, so they are computed from x here. A mask has the
shape (N, 1, ...); the module `backnorm.weighted` describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backnorm import weighted
from backnorm.second_order.formulas import ABSENT, Channels, by_dy, by_x, factors
from backnorm.torch.memory import statistics_type


class _Normalised(NamedTuple):
    """x minus its mean, and the statistics of every channel, in float64."""

    # `centred` is x - mean; `scale` is 1 / sqrt(variance + eps).
    centred: Tensor
    mean: Tensor
    scale: Tensor
    # `share` is 1 / M, where M is the number of elements per channel; with a mask, the weight of
    # each element, divided by the sum of weights. With frozen statistics, `share` is ABSENT,
    # because the formulas then have no terms with 1 / M.
    share: Any


def backward(
    saved: Sequence[Any], eps: float, training: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias. `saved` are x, dy, mean, variance and weight."""
    x, dy, mean, variance, weight = saved
    elements = _normalised(x, mean, variance, eps, training, mask)
    normalised = elements.centred * elements.scale
    # dbias, and with frozen statistics dx, do not depend on x. Like the results of PyTorch's own
    # operator, they are functions of x nevertheless, whose derivative is 0: hooks on the way to x
    # are called. The product of x and 0 would be NaN if x is infinite.
    gradient = torch.where(x.new_ones((), dtype=torch.bool), dy.double(), elements.centred)
    dbias = _sum(gradient)
    dweight = _sum(gradient * normalised)
    if training:
        gradient = gradient - (dbias + normalised * dweight) * elements.share
    dx = gradient * elements.scale
    if weight is not None:
        dx = dx * _column(weight, x)
    dtype = statistics_type(x.dtype) if weight is None else weight.dtype
    return dx.to(x.dtype), _row(dweight, x, dtype), _row(dbias, x, dtype)


def masked_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Tensor, eps: float
) -> tuple[Tensor, ...]:
    """Return y, and mean, biased variance and number of the counted elements, in float64."""
    centred, *moments = _masked_moments(x, mask)
    y = centred * (moments[1] + eps).rsqrt()
    y = y if weight is None else y * _column(weight, x)
    y = y if bias is None else y + _column(bias, x)
    return y.to(x.dtype), *(each.reshape(x.shape[1]) for each in moments)


def double_backward(
    saved: Sequence[Any], cotangents: Sequence[Any], eps: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given the gradients of the results of `backward`.

    `saved` are x, dy, mean, variance and weight.

    `backnorm.second_order.formulas` has the formulas.
    """
    x, dy, mean, variance, weight = saved
    ddx, ddweight, ddbias = cotangents
    elements = _normalised(x, mean, variance, eps, training)
    gamma = 1.0 if weight is None else _column(weight, x)
    columns = (ABSENT if each is None else _column(each, x) for each in (ddweight, ddbias))
    channels = Channels(elements.mean, elements.scale, gamma, *columns)
    gradient = dy.double()
    outer = ABSENT if ddx is None else ddx.double()

    found = factors(_sums, x.double(), gradient, outer, channels, share=elements.share)
    normalised = elements.centred * elements.scale
    centred_outer = outer - found.mean_ddx
    gx = by_x(found, normalised, gradient - found.mean_dy, centred_outer)
    gdy = by_dy(found, normalised, centred_outer)
    gx = torch.zeros_like(x) if gx is ABSENT else gx.to(x.dtype)
    # If ddx and ddweight are None, the formula gives only one value of gdy per channel, which is
    # expanded to all elements of the channel.
    gdy = torch.zeros_like(dy) if gdy is ABSENT else gdy.expand_as(dy).to(dy.dtype)
    dtype = statistics_type(x.dtype) if weight is None else weight.dtype
    if found.gamma is ABSENT:
        return gx, gdy, x.new_zeros((x.shape[1],), dtype=dtype)
    return gx, gdy, _row(found.gamma, x, dtype)


def _masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
    """Return what `weighted.moments` does; without counted elements, mean and variance are NaN."""
    return weighted.moments(_sums, x.double(), mask.double().expand(x.shape))


def _normalised(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    training: bool,
    mask: Tensor | None = None,
) -> _Normalised:
    if mask is not None:
        centred, column, square, count = _masked_moments(x, mask)
        return _Normalised(centred, column, (square + eps).rsqrt(), mask.double() / count)
    wide = x.double()
    if not training:
        column = _column(mean, x)
        scale = (_column(variance, x) + eps).rsqrt()
        return _Normalised(wide - column, column, scale, ABSENT)
    # In an empty batch the sums are 0. They are then divided by 1, not by the number of elements,
    # which is 0.
    share = 1.0 / max(x.numel() // max(x.shape[1], 1), 1)
    column = _sum(wide) * share
    centred = wide - column
    scale = (_sum(centred * centred) * share + eps).rsqrt()
    return _Normalised(centred, column, scale, share)


def _sum(elements: Tensor) -> Tensor:
    """Return the sum of every channel, in a shape that broadcasts with the elements."""
    return elements.sum([axis for axis in range(elements.dim()) if axis != 1], keepdim=True)


def _sums(left: Tensor, right: Tensor, pivot: Any) -> tuple[Tensor, Tensor]:
    return _sum(right), _sum(right * (left - pivot))


def _column(channels: Tensor, x: Tensor) -> Tensor:
    return channels.double().view(-1, *[1] * (x.dim() - 2))


def _row(column: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return column.reshape(x.shape[1]).to(dtype)
