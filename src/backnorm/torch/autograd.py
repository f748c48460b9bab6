"""Eager calls on plain tensors: the shortest way from autograd to the kernels and back.

Here are only the forward and the first backward, with as few arguments as will do. What is
differentiated again, or transformed, goes on in `transforms`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch import kernels, state, transforms

__all__ = ["freeze", "rectify", "train"]


class Trained(Function):
    """Normalisation with the batch's own statistics, which may move running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: kernels.Running | None,
    ) -> Tensor:
        """Return y."""
        y, mean, variance, _, step = kernels.trained(
            x, None, weight, bias, eps, running, relu=False
        )
        ctx.save_for_backward(x, weight)
        ctx.known = mean, variance, eps, step
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        return *_gradients(ctx, dy, True), None, None


class Frozen(Function):
    """Normalisation with given statistics, which are constants."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        statistics: tuple[Tensor, Tensor],
    ) -> Tensor:
        """Return y."""
        mean, variance = statistics
        y = kernels.inference(x, mean, variance, weight, bias, eps)
        ctx.save_for_backward(x, weight)
        # A later batch in training moves the running statistics without telling autograd.
        ctx.known = mean.detach().clone(), variance.detach().clone(), eps, None
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        return *_gradients(ctx, dy, False), None, None


class Rectified(Function):
    """relu(normalised x + residual), by the batch's own statistics, which may move running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        running: kernels.Running | None,
    ) -> Tensor:
        """Return y."""
        y, mean, variance, mask, step = kernels.trained(
            x, residual, weight, bias, eps, running, relu=True
        )
        ctx.save_for_backward(x, weight, mask)
        ctx.known = mean, variance, eps, step
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight, bias and residual."""
        x, weight, mask = ctx.saved_tensors
        mean, variance, eps, step = ctx.known
        needs_residual = ctx.needs_input_grad[3]
        dresidual: Tensor | None
        if torch.is_grad_enabled() or state.watched(dy):
            dresidual = torch.where(kernels.unpack_mask(mask, x), dy, 0.0)
            gradients = transforms.backward(x, dresidual, mean, variance, weight, eps, True)
        else:
            dx, dweight, dbias, dresidual = kernels.relu_backward(
                x, dy, mask, mean, variance, weight, eps, needs_residual, step
            )
            gradients = dx, dweight, dbias
        return *_needed(ctx, *gradients), dresidual if needs_residual else None, None, None


def _gradients(ctx: Any, dy: Tensor, training: bool) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    mean, variance, eps, step = ctx.known
    if torch.is_grad_enabled() or state.watched(dy):
        gradients = transforms.backward(x, dy, mean, variance, weight, eps, training)
    else:
        gradients = kernels.backward(x, dy, mean, variance, weight, eps, training, step)
    return _needed(ctx, *gradients)


def _needed(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs that want one; an input that is absent wants none."""
    needed = ctx.needs_input_grad
    if needed[0] and needed[1] and needed[2]:
        return gradients
    pairs = zip(needed, gradients, strict=False)
    return tuple(gradient if wanted else None for wanted, gradient in pairs)


# Without what `Function.apply` does for transforms before: there are none where these are called.
train = super(Function, Trained).apply
freeze = super(Function, Frozen).apply
rectify = super(Function, Rectified).apply
