"""Eager calls on plain tensors: the shortest way from autograd to the kernels and back.

Here are only the forward and the first backward, with as few arguments as will do. What is
differentiated again, or transformed, goes on in `operations`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch import kernels, operations, state
from backnorm.torch.statistics import Running

__all__ = ["freeze", "train"]


class _Normalised(Function):
    """The backward pass that training and given statistics share."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, residual, weight and bias."""
        x, mask, weight = ctx.saved_tensors
        mean, variance, eps, training = ctx.known
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or state.watched(dy):
            gradients = operations.backward(
                x, dy, mask, mean, variance, weight, eps, training, needed[1]
            )
        else:
            gradients = kernels.backward(
                x, dy, mask, mean, variance, weight, eps, training,
                has_residual=needed[1],
            )  # fmt: skip
        return *operations.in_order_of_inputs(needed, *gradients), None, None, None


class _Trained(_Normalised):
    """Normalisation with the batch's own statistics, which may update running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: Running | None,
        relu: bool,
    ) -> Tensor:
        """Return y."""
        y, mean, variance, mask = kernels.forward(
            x, residual, weight, bias, eps, running, relu=relu
        )
        ctx.save_for_backward(x, mask, weight)
        ctx.known = mean, variance, eps, True
        return y


class _Frozen(_Normalised):
    """Normalisation with given statistics, which are constants; without a ReLU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        mean: Tensor,
        variance: Tensor,
    ) -> Tensor:
        """Return y."""
        y = kernels.inference(x, residual, weight, bias, mean, variance, eps, False)
        ctx.save_for_backward(x, None, weight)
        # A later batch in training updates the running statistics without telling autograd.
        ctx.known = mean.detach().clone(), variance.detach().clone(), eps, False
        return y


# Without what `Function.apply` does for transforms before: there are none where these are called.
train = super(Function, _Trained).apply
freeze = super(Function, _Frozen).apply
