"""Eager calls on plain tensors: the shortest way from autograd to the kernels and back.

Here are only the forward and the first backward, with as few arguments as will do. What is
differentiated again, or transformed, goes on in `operations`.

Classes are called what a graph's nodes should be, with "Backward" behind it, and are shown to a
profiler as operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, profiler

from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentError
from backnorm.torch import events, kernels, operations, state
from backnorm.torch.checks import in_words
from backnorm.torch.classes import OpaqueTensorError, asked
from backnorm.torch.memory import check_before_pytorch
from backnorm.torch.rectifiers import derivative, rectified
from backnorm.torch.statistics import Running

__all__ = ["freeze", "rectify", "train", "train_add_relu", "train_relu"]

# The names of the forward pass for what it saved.
_WORDS = {"x": "input", "gamma": "weight"}


def _shown_as(name: str) -> Callable[[type[Function]], type[Function]]:
    """Name a class for the profiler; nodes of graphs have its first name."""

    def rename(cls: type[Function]) -> type[Function]:
        cls.__name__ = f"backnorm::{name}"
        return cls

    return rename


class _Normalised(Function):
    """The backward pass that training and given statistics share."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, residual, weight and bias."""
        x, mask, weight = ctx.saved_tensors
        mean, variance, eps, training, arithmetic = ctx.known
        needed = ctx.needs_input_grad
        given = x, dy, mask, mean, variance, weight, eps, training, needed[1], arithmetic
        try:
            if torch.is_grad_enabled() or state.watched(dy):
                gradients = asked(operations.backward, *given, dy=dy)
            else:
                run = kernels.backward
                if profiler._is_profiler_enabled:
                    run = events.shown(run, "batch_norm_backward")
                gradients = run(*given)
        except OpaqueTensorError:
            # Who packs what is saved may unpack it as something else.
            gradients = asked(operations.backward, *given, dy=dy, input=x, weight=weight)
        except ArgumentError as error:
            raise in_words(error, _WORDS) from None
        return *operations.in_order_of_inputs(needed, *gradients), *[None] * (len(needed) - 4)


@_shown_as("batch_norm")
class BatchNorm(_Normalised):
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
        ceiling: float | None,
        arithmetic: Arithmetic,
    ) -> Tensor:
        """Return y."""
        y, mean, variance, mask = kernels.forward(
            x, residual, weight, bias, eps, running, relu, ceiling, arithmetic
        )
        ctx.save_for_backward(x, mask, weight)
        ctx.known = mean, variance, eps, True, arithmetic
        return y


@_shown_as("batch_norm_relu")
class BatchNormRelu(BatchNorm):
    """The same before a ReLU."""


@_shown_as("batch_norm_add_relu")
class BatchNormAddRelu(BatchNorm):
    """The same before the addition of a residual and a ReLU."""


@_shown_as("batch_norm_inference")
class BatchNormInference(_Normalised):
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
        arithmetic: Arithmetic,
    ) -> Tensor:
        """Return y."""
        given, how = (x, residual, weight, bias, mean, variance), (eps, False, None, arithmetic)
        y = kernels.inference(*given, *how)
        ctx.save_for_backward(x, None, weight)
        # A later batch in training updates the running statistics without telling autograd.
        known = mean.detach().clone(), variance.detach().clone()
        ctx.known = *known, eps, False, arithmetic
        return y


@_shown_as("relu")
class Relu(Function):
    """PyTorch's ReLU, which looks whether what it reads in the backward pass is in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ceiling: float | None) -> Tensor:
        """Return relu(x), no more than the ceiling."""
        y = rectified(x, ceiling)
        ctx.save_for_backward(y)
        ctx.ceiling = ceiling
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of x."""
        (y,) = ctx.saved_tensors
        check_before_pytorch(dy=dy, y=y)
        dx: Tensor = asked(derivative, dy, y, ctx.ceiling, dy=dy, y=y)
        return dx, None


# Without what `Function.apply` does for transforms before: there are none where these are called.
train = super(Function, BatchNorm).apply
train_relu = super(Function, BatchNormRelu).apply
train_add_relu = super(Function, BatchNormAddRelu).apply
freeze = super(Function, BatchNormInference).apply
rectify = super(Function, Relu).apply
