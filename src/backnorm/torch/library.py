"""The operators that PyTorch's dispatcher knows: ``torch.ops.backnorm.*``.

They are what `torch.compile`, `torch.export`, fake tensors and modes that watch operators see
instead of a call into the kernels. All are functions: none writes to an argument; the running
statistics are moved by PyTorch's own operators beside them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import custom_op

from backnorm.errors import BacknormError
from backnorm.torch import batching, kernels

__all__ = [
    "ThirdOrderError",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_double_backward",
    "batch_norm_inference",
    "like_parameter",
    "like_statistics",
    "refuse_third_order",
]


class ThirdOrderError(BacknormError, NotImplementedError):
    """The third derivative of batch normalisation was asked for."""


def like_statistics(x: Tensor) -> Tensor:
    """Return a new tensor like a mean of x."""
    return x.new_empty((x.shape[1],), dtype=kernels.statistics_type(x.dtype))


def like_parameter(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return a new tensor like a gradient of `weight`."""
    return like_statistics(x) if weight is None else weight.new_empty((x.shape[1],))


@custom_op("backnorm::batch_norm", mutates_args=())
def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and biased variance of the batch."""
    return kernels.forward(x, weight, bias, eps)


@batch_norm.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), like_statistics(x), like_statistics(x)


@custom_op("backnorm::batch_norm_inference", mutates_args=())
def batch_norm_inference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return y, normalised with given statistics."""
    return kernels.inference(x, mean, variance, weight, bias, eps)


@batch_norm_inference.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


@custom_op("backnorm::batch_norm_backward", mutates_args=())
def batch_norm_backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    return kernels.backward(x, dy, mean, variance, weight, eps, training)


@batch_norm_backward.register_fake
def _(
    x: Tensor, dy: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), like_parameter(x, weight), like_parameter(x, weight)


@custom_op("backnorm::batch_norm_double_backward", mutates_args=())
def batch_norm_double_backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    eps: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given those of what the backward returns."""
    return kernels.double_backward(
        x, dy, mean, variance, weight, ddx, ddweight, ddbias, eps, training
    )


@batch_norm_double_backward.register_fake
def _(
    x: Tensor, dy: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x), like_parameter(x, weight)


def _setup_batch_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, ctx.eps = inputs
    _, mean, variance = output
    ctx.mark_non_differentiable(mean, variance)
    ctx.save_for_backward(x, mean, variance, weight)


def _batch_norm_gradient(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    x, mean, variance, weight = ctx.saved_tensors
    dx, dweight, dbias = batch_norm_backward(x, dy, mean, variance, weight, ctx.eps, True)
    return dx, _needed(ctx, 1, dweight), _needed(ctx, 2, dbias), None


def _setup_inference(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, variance, weight, _, ctx.eps = inputs
    ctx.save_for_backward(x, mean, variance, weight)


def _inference_gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, mean, variance, weight = ctx.saved_tensors
    dx, dweight, dbias = batch_norm_backward(x, dy, mean, variance, weight, ctx.eps, False)
    return dx, None, None, _needed(ctx, 3, dweight), _needed(ctx, 4, dbias), None


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, dy, mean, variance, weight, ctx.eps, ctx.training = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, dy, mean, variance, weight)


def _backward_gradient(
    ctx: Any, ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
) -> tuple[Tensor | None, ...]:
    gx, gdy, gweight = batch_norm_double_backward(
        *ctx.saved_tensors, ddx, ddweight, ddbias, ctx.eps, ctx.training
    )
    return gx, gdy, None, None, _needed(ctx, 4, gweight), None, None


def _double_backward_gradient(ctx: Any, *_: Any) -> NoReturn:
    refuse_third_order()


batch_norm.register_autograd(_batch_norm_gradient, setup_context=_setup_batch_norm)
batch_norm_inference.register_autograd(_inference_gradient, setup_context=_setup_inference)
batch_norm_backward.register_autograd(_backward_gradient, setup_context=_setup_backward)
batch_norm_double_backward.register_autograd(_double_backward_gradient)
for _operator in (
    batch_norm, batch_norm_inference, batch_norm_backward, batch_norm_double_backward,
):  # fmt: skip
    _operator.register_vmap(batching.rule(_operator))


def refuse_third_order() -> NoReturn:
    """Raise because the third derivative is not implemented."""
    raise ThirdOrderError(
        "batch normalisation by backnorm is differentiable twice, not three times; "
        "backnorm.torch.revert(model) gives a model PyTorch's layers back"
    )


def _needed(ctx: Any, position: int, gradient: Tensor) -> Tensor | None:
    return gradient if ctx.needs_input_grad[position] else None
