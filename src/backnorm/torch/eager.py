"""Eager calls on tensors in memory: the shortest way from autograd to the kernels and back.

The functions here compute the forward pass and the first backward pass, with the mask that kernels
write. `operations` computes whatever is differentiated again or transformed.

Why eager calls have a class of their own: a training step of a layer, forward and backward, on
(8, 16, 8, 8) takes MEASURED. Operators with derivatives also return the batch's statistics to
autograd, and cannot keep a mask as bits, because a compiler may lay out x anew between the passes.

A node of the graph is named after its class, with "Backward" behind it; a profiler shows the class
by its qualified name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.activations import Activation
from backnorm.errors import ArgumentError
from backnorm.torch import kernels, operations
from backnorm.torch.activations import activate, derivative
from backnorm.torch.checks import renamed
from backnorm.torch.dispatch import needs_dispatcher, profiled
from backnorm.torch.kernels import Saved
from backnorm.torch.options import Options
from backnorm.torch.running_statistics import Running
from backnorm.torch.tensors import PLAIN, by_operators, in_order, is_opaque, order_in_memory

__all__ = ["freeze", "name_of", "train"]

# The forward pass' names for the tensors that it saved.
_NAMES = {"x": "input", "gamma": "weight"}


class _Normalisation(Function):
    """The backward pass that training and given statistics share; `ctx.options` are `Options`."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, residual, weight and bias."""
        needed = ctx.needs_input_grad
        # Saved tensors are unpacked without dy, too: a checkpoint recomputes its layers then.
        x, mask, weight, bias, mean, variance, order = ctx.saved_tensors
        if dy is None:
            return (None,) * len(needed)
        if mask is not None:
            x = in_order(x, order)
        saved, has_residual = Saved(x, weight, mean, variance, mask, bias), needed[1]
        # A hook of saved tensors may return a subclass of tensors.
        if torch.is_grad_enabled() or needs_dispatcher(dy) or is_opaque(dy) or type(x) not in PLAIN:
            gradients = by_operators(
                _by_operations, saved, dy, ctx.options, dy=dy, input=x, weight=weight
            )
        else:
            run = profiled(kernels.backward, "batch_norm_backward")
            try:
                gradients = run(saved, dy, ctx.options, has_residual)
            except ArgumentError as error:
                raise renamed(error, _NAMES) from None
        dx, dweight, dbias, dresidual = gradients
        return (
            dx if needed[0] else None,
            dresidual if has_residual else None,
            dweight if needed[2] else None,
            dbias if needed[3] else None,
            *[None] * (len(needed) - 4),
        )


def _by_operations(saved: Saved, dy: Tensor, options: Options) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and residual, which can be differentiated again."""
    x, weight, mean, variance, mask, bias = saved
    activation = options.activation
    if mask is not None:
        dy = torch.where(kernels.unpack_mask(mask, x), dy, 0.0)
    elif activation is not None:
        # To differentiate again, the activation's input must be a function of x.
        z = operations.forward(x, weight, bias, options.eps, options.arithmetic)[0]
        dy = _before_activation(dy, z, activation)
    settings = options.eps, options.training, options.arithmetic
    return *operations.backward(x, dy, mean, variance, weight, *settings), dy


def _before_activation(dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """Return the gradient of z, the input of an activation, as a function of both."""
    if not torch.is_grad_enabled():
        return derivative(dy, z, activation)
    # PyTorch's operators of derivatives have no derivatives.
    (dz,) = torch.autograd.grad(activate(z, activation), z, dy, create_graph=True)
    return dz


class BatchNorm(_Normalisation):
    """Normalisation with the batch's statistics, which may update running ones."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running | None,
        options: Options,
    ) -> Tensor:
        """Return y."""
        y, mean, variance, mask = kernels.forward(x, residual, weight, bias, running, options)
        ctx.set_materialize_grads(False)
        if mask is None:
            kept = None
            if bias is not None and options.activation is not None:
                # The backward pass of a smooth activation reads the bias. PyTorch's layer does not
                # save it, and so accepts one that was made in inference mode.
                kept = bias.clone() if bias.is_inference() else bias
            ctx.save_for_backward(x, None, weight, kept, mean, variance, None)
        else:
            # A checkpoint that recomputes the forward pass replaces saved tensors, nothing else.
            order = order_in_memory(x.stride())
            ctx.save_for_backward(x, mask, weight, None, mean, variance, order)
        ctx.options = options
        return y


class BatchNormInference(_Normalisation):
    """Normalisation with given statistics, which are constants, and no activation."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: None,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: tuple[Tensor, Tensor],
        options: Options,
    ) -> Tensor:
        """Return y."""
        y = kernels.inference(x, None, weight, bias, statistics, options)
        ctx.set_materialize_grads(False)
        # A later batch in training moves the running statistics, and autograd does not see it.
        mean, variance = (tensor.detach().clone() for tensor in statistics)
        ctx.save_for_backward(x, None, weight, None, mean, variance, None)
        ctx.options = options
        return y


def name_of(options: Options, residual: Tensor | None) -> str:
    """Return the name of a forward pass in a profile."""
    name = "batch_norm" + ("_add" if residual is not None else "")
    if options.activation is not None:
        name += "_relu" if options.activation.name == "relu" else "_activation"
    return name if options.training else f"{name}_inference"


def _function(base: type[Function], suffix: str) -> Any:
    """Return `apply` of a class that graphs and profiles show by a name of its own.

    It skips what `Function.apply` does for transforms, which are not active in eager calls.
    """
    cls = type(base.__name__ + suffix, (base,), {"__module__": __name__})
    name = "".join(f"_{c.lower()}" if c.isupper() else c for c in cls.__name__).strip("_")
    cls.__name__ = f"backnorm::{name}"
    return super(Function, cls).apply


_TRAIN = {name: _function(BatchNorm, name) for name in ("", "Relu", "AddRelu", "Activation")}
_freeze = _function(BatchNormInference, "")


def train(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    options: Options,
) -> Tensor:
    """Return y in training, as a function of x, residual, weight and bias."""
    suffix = ""
    if options.activation is not None:
        suffix = "Activation"
        if options.activation.name == "relu":
            suffix = "Relu" if residual is None else "AddRelu"
    y: Tensor = _TRAIN[suffix](x, residual, weight, bias, running, options)
    return y


def freeze(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor, Tensor],
    options: Options,
) -> Tensor:
    """Return y, normalised with given statistics, as a function of x, weight and bias."""
    y: Tensor = _freeze(x, None, weight, bias, statistics, options)
    return y
