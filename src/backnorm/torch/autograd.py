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
from backnorm.torch.activations import activated
from backnorm.torch.activations import derivative as derivative_of_activation
from backnorm.torch.checks import in_words
from backnorm.torch.classes import OpaqueTensorError, asked
from backnorm.torch.memory import check_before_pytorch, in_order, order_in_memory
from backnorm.torch.rectifiers import derivative, rectified
from backnorm.torch.statistics import Running

__all__ = [
    "activate",
    "freeze",
    "rectify",
    "train",
    "train_activated",
    "train_add_relu",
    "train_relu",
]

# The names of the forward pass for what it saved.
_WORDS = {"x": "input", "gamma": "weight"}


def _shown_as(name: str) -> Callable[[type[Function]], type[Function]]:
    """Name a class for the profiler; nodes of graphs have its first name."""

    def rename(cls: type[Function]) -> type[Function]:
        cls.__name__ = f"backnorm::{name}"
        return cls

    return rename


class _Normalised(Function):
    """The backward pass that training and given statistics share.

    `ctx.options` are eps, training and arithmetic. With a mask the last saved tensor is `order`.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, residual, weight and bias."""
        needed = ctx.needs_input_grad
        # Unpacked without dy, too, as PyTorch's are: a checkpoint recomputes its layers then.
        x, mask, weight, mean, variance, order = ctx.saved_tensors
        if dy is None:
            return (None,) * len(needed)
        if mask is not None:
            x = in_order(x, order)
        eps, training, arithmetic = ctx.options
        arguments = x, dy, mask, mean, variance, weight, eps, training, needed[1], arithmetic
        return _gradients(ctx, kernels.backward, _by_operations, arguments, weight)


def _by_operations(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    has_residual: bool,
    arithmetic: Arithmetic,
) -> Any:
    """Return what `kernels.backward` does by operations, which have derivatives."""
    if mask is not None:
        dy = operations.masked(dy, kernels.unpack_mask(mask, x))
    found = operations.backward(x, dy, mean, variance, weight, eps, training, arithmetic)
    return *found, dy if has_residual else None


def _gradients(
    ctx: Any,
    by_kernels: Callable[..., Any],
    by_operations: Callable[..., Any],
    arguments: tuple[Any, ...],
    weight: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs of a function: x, residual, weight, bias, and no others.

    Both functions take `arguments`, x and dy first. Operations compute the gradients if they are to
    be differentiated again or if dy has no memory, kernels otherwise.
    """
    x, dy = arguments[:2]
    needed = ctx.needs_input_grad
    try:
        if torch.is_grad_enabled() or state.watched(dy):
            gradients = asked(by_operations, *arguments, dy=dy)
        else:
            if profiler._is_profiler_enabled:
                by_kernels = events.shown(by_kernels, "batch_norm_backward")
            gradients = by_kernels(*arguments)
    except OpaqueTensorError:
        # A `saved_tensors_hooks` unpack hook may return a tensor subclass.
        gradients = asked(by_operations, *arguments, dy=dy, input=x, weight=weight)
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
        ctx.set_materialize_grads(False)
        # A checkpoint that recomputes the forward pass replaces saved tensors, and nothing else.
        order = None if mask is None else order_in_memory(x.stride())
        ctx.save_for_backward(x, mask, weight, mean, variance, order)
        ctx.options = eps, True, arithmetic
        return y


@_shown_as("batch_norm_relu")
class BatchNormRelu(BatchNorm):
    """The same before a ReLU."""


@_shown_as("batch_norm_add_relu")
class BatchNormAddRelu(BatchNorm):
    """The same before the addition of a residual and a ReLU."""


@_shown_as("batch_norm_activation")
class BatchNormActivation(Function):
    """The same before another activation: what that is applied to is computed again, not kept."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        running: Running | None,
        activation: str,
        arithmetic: Arithmetic,
    ) -> Tensor:
        """Return y."""
        # A bias made in inference mode cannot be saved. PyTorch's layer saves no bias and takes it.
        kept = bias.clone() if bias is not None and bias.is_inference() else bias
        ctx.set_materialize_grads(False)
        y, mean, variance = kernels.forward_activated(
            x, weight, bias, eps, running, activation, arithmetic
        )
        ctx.save_for_backward(x, weight, kept, mean, variance)
        ctx.options = eps, activation, arithmetic
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, weight and bias."""
        x, weight, bias, mean, variance = ctx.saved_tensors
        if dy is None:
            return (None,) * len(ctx.needs_input_grad)
        arguments = x, dy, mean, variance, weight, bias, *ctx.options
        by_kernels, by_operations = kernels.backward_activated, _by_operations_activated
        return _gradients(ctx, by_kernels, by_operations, arguments, weight)


def _by_operations_activated(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    arithmetic: Arithmetic,
) -> Any:
    """Return what `kernels.backward_activated` does by operations, which have derivatives.

    To differentiate again, the activation's input must be a function of x.
    """
    z = operations.forward(x, None, weight, bias, eps, False, arithmetic, None)[0]
    dz = _before_activation(dy, z, activation)
    return *operations.backward(x, dz, mean, variance, weight, eps, True, arithmetic), None


def _before_activation(dy: Tensor, z: Tensor, activation: str) -> Tensor:
    """Return the gradient of what an activation was applied to."""
    check_before_pytorch(dy=dy, input=z)
    if not torch.is_grad_enabled():
        return derivative_of_activation(dy, z, activation)
    # PyTorch's operators of derivatives have no derivatives.
    (dz,) = torch.autograd.grad(activated(z, activation), z, dy, create_graph=True)
    return dz


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
        operands, options = (x, residual, weight, bias, mean, variance), (eps, False, None)
        y = kernels.inference(*operands, *options, arithmetic)
        ctx.set_materialize_grads(False)
        # A later batch in training updates the running statistics without telling autograd.
        statistics = mean.detach().clone(), variance.detach().clone()
        ctx.save_for_backward(x, None, weight, *statistics, None)
        ctx.options = eps, False, arithmetic
        return y


@_shown_as("relu")
class Relu(Function):
    """PyTorch's ReLU, which looks whether what it reads in the backward pass is in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ceiling: float | None) -> Tensor:
        """Return relu(x), no more than the ceiling."""
        y = rectified(x, ceiling)
        ctx.set_materialize_grads(False)
        # As PyTorch's: what a ReLU6 returns may be changed in place, what a ReLU returns may not.
        ctx.save_for_backward(y if ceiling is None else x)
        ctx.ceiling = ceiling
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the gradient of x."""
        (saved,) = ctx.saved_tensors
        if dy is None:
            return None, None
        check_before_pytorch(dy=dy, y=saved)
        dx: Tensor = asked(derivative, dy, saved, ctx.ceiling, dy=dy, y=saved)
        return dx, None


@_shown_as("activation")
class Activation(Function):
    """PyTorch's SiLU or Hardswish; as `Relu`."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, activation: str) -> Tensor:
        """Return z with the activation applied."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(z)
        ctx.activation = activation
        return activated(z, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, None]:
        """Return the gradient of z."""
        (z,) = ctx.saved_tensors
        if dy is None:
            return None, None
        dz = asked(_before_activation, dy, z, ctx.activation, dy=dy)
        return dz, None


# Without what `Function.apply` does for transforms before: there are none where these are called.
train = super(Function, BatchNorm).apply
train_relu = super(Function, BatchNormRelu).apply
train_add_relu = super(Function, BatchNormAddRelu).apply
train_activated = super(Function, BatchNormActivation).apply
freeze = super(Function, BatchNormInference).apply
rectify, activate = super(Function, Relu).apply, super(Function, Activation).apply
