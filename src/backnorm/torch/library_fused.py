"""The operators of `library` for normalisation, a residual and ReLU in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from backnorm.torch import kernels
from backnorm.torch.library import batch_norm_double_backward, like_parameter, like_statistics

__all__ = [
    "batch_norm_relu",
    "batch_norm_relu_backward",
    "batch_norm_relu_inference",
    "unpack_mask",
]


@custom_op("backnorm::batch_norm_relu", mutates_args=())
def batch_norm_relu(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, mean and biased variance of the batch, and the mask of y's positive elements."""
    y, mean, variance, mask = kernels.relu_forward(x, residual, weight, bias, eps)
    # What is behind the bits may be anything. Who compares results wants them to be equal.
    mask[-kernels.mask_size(0) :].zero_()
    return y, mean, variance, mask


@batch_norm_relu.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mask = x.new_empty((kernels.mask_size(x.numel()),), dtype=torch.uint8)
    return torch.empty_like(x), like_statistics(x), like_statistics(x), mask


@custom_op("backnorm::batch_norm_relu_inference", mutates_args=())
def batch_norm_relu_inference(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return y, with given statistics. It has no derivative: its mask is not kept."""
    return kernels.relu_inference(x, residual, mean, variance, weight, bias, eps)


@batch_norm_relu_inference.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@custom_op("backnorm::batch_norm_relu_backward", mutates_args=())
def batch_norm_relu_backward(
    x: Tensor,
    dy: Tensor,
    mask: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and residual, the last empty if there is none."""
    *gradients, dresidual = kernels.relu_backward(
        x, dy, mask, mean, variance, weight, eps, has_residual
    )
    dx, dweight, dbias = gradients
    return dx, dweight, dbias, x.new_empty(0) if dresidual is None else dresidual


@batch_norm_relu_backward.register_fake
def _(
    x: Tensor,
    dy: Tensor,
    mask: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dresidual = torch.empty_like(x) if has_residual else x.new_empty(0)
    return torch.empty_like(x), like_parameter(x, weight), like_parameter(x, weight), dresidual


@custom_op("backnorm::unpack_mask", mutates_args=())
def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask as booleans, in shape and memory as x."""
    return kernels.unpack_mask(mask, x)


@unpack_mask.register_fake
def _(mask: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, _, ctx.eps = inputs
    _, mean, variance, mask = output
    ctx.has_residual = residual is not None
    ctx.mark_non_differentiable(mean, variance, mask)
    ctx.save_for_backward(x, mask, mean, variance, weight)


def _gradient(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, mask, mean, variance, weight = ctx.saved_tensors
    dx, dweight, dbias, dresidual = batch_norm_relu_backward(
        x, dy, mask, mean, variance, weight, ctx.eps, ctx.has_residual
    )
    needs = ctx.needs_input_grad
    return (
        dx,
        dresidual if needs[1] else None,
        dweight if needs[2] else None,
        dbias if needs[3] else None,
        None,
    )


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, dy, mask, mean, variance, weight, ctx.eps, ctx.has_residual = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, dy, mask, mean, variance, weight)


def _backward_gradient(
    ctx: Any,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    ddresidual: Tensor | None,
) -> tuple[Tensor | None, ...]:
    x, dy, mask, mean, variance, weight = ctx.saved_tensors
    positive = unpack_mask(mask, x)
    gx, gdy, gweight = batch_norm_double_backward(
        x,
        torch.where(positive, dy, 0.0),
        mean,
        variance,
        weight,
        ddx,
        ddweight,
        ddbias,
        ctx.eps,
        True,
    )
    if ddresidual is not None and ctx.has_residual:
        gdy = gdy + ddresidual
    gdy = torch.where(positive, gdy, 0.0)
    return gx, gdy, None, None, None, gweight if ctx.needs_input_grad[5] else None, None, None


batch_norm_relu.register_autograd(_gradient, setup_context=_setup)
batch_norm_relu_backward.register_autograd(_backward_gradient, setup_context=_setup_backward)
