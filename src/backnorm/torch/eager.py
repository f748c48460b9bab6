"""Autograd functions that call the kernels directly, for eager calls on tensors in memory.

The functions here compute the forward pass and the first backward pass. The module `library`
computes calls under a transform of `torch.func`, and gradients that are differentiated again.

Eager calls have their own classes, because a forward and backward pass on (8, 16, 8, 8) takes 0.13
ms with these classes and 0.55 ms with the operators `torch.ops.backnorm` (AMD EPYC, one thread).
The operators have two more disadvantages. They return the batch's statistics as further results, so
that autograd has more tensors to handle. And the operators cannot save a ReLU's mask as bits: these
bits are in the memory order of x, and a compiler may change the layout of x between the forward and
the backward operator.

The classes have names that users can read: a node in the autograd graph has the name that its class
was defined with, followed by "Backward"; a profiler shows the attribute `__name__` of the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, profiler

from backnorm.activations import Activation
from backnorm.errors import ArgumentError
from backnorm.options import Options
from backnorm.torch import engines, library
from backnorm.torch.activations import activate, derivative
from backnorm.torch.checks import renamed
from backnorm.torch.dispatch import PLAIN, by_operators, needs_dispatcher
from backnorm.torch.memory import order_of, unpack_mask


class _Normalisation(Function):
    """The backward pass of `BatchNorm` and `BatchNormInference`. Their forward passes store an
    `Options` in `ctx.options`.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, residual, weight and bias."""
        needed = ctx.needs_input_grad
        # Unpack the saved tensors even if dy is None. If the layer is in a checkpoint, unpacking
        # starts the recomputation of the checkpoint's layers.
        x, mask, weight, bias, mean, variance, order = ctx.saved_tensors
        if dy is None:
            return (None,) * len(needed)
        if mask is not None:
            x = _in_order(x, order)
        operands, has_residual = (x, dy, mask, mean, variance, weight), needed[1]
        call = "batch_norm_backward", ctx.options, has_residual
        key, known = engines.look_up(call, operands, dy)
        # The kernels take plain tensors only; x may be of a subclass if a saved-tensor hook
        # returned it.
        if known is None and (
            torch.is_grad_enabled() or needs_dispatcher(dy) or type(x) not in PLAIN
        ):
            gradients = by_operators(
                _by_library, operands, bias, ctx.options, dy=dy, input=x, weight=weight
            )
        else:
            try:
                run = known or engines.backward(operands, ctx.options, has_residual)
                gradients = profiled(run, "batch_norm_backward")(operands, bias)
            except ArgumentError as error:
                raise renamed(error, {"x": "input", "gamma": "weight"}) from None
            if known is None:
                engines.keep(key, run, operands)
        dx, dweight, dbias, dresidual = gradients
        return (
            dx if needed[0] else None,
            dresidual if has_residual else None,
            dweight if needed[2] else None,
            dbias if needed[3] else None,
            *[None] * (len(needed) - 4),
        )


def _by_library(
    operands: tuple[Any, ...], bias: Tensor | None, options: Options
) -> tuple[Tensor | None, ...]:
    """Return differentiable gradients of x, weight, bias and residual."""
    x, dy, mask, mean, variance, weight = operands
    activation = options.activation
    if mask is not None:
        dy = torch.where(unpack_mask(mask, x), dy, 0.0)
    elif activation is not None:
        # Recompute the activation's input as a function of x, so that gradients can be
        # differentiated.
        z = library.forward(x, weight, bias, options.epsilon, options.arithmetic)[0]
        dy = _before_activation(dy, z, activation)
    settings = options.epsilon, options.training, options.arithmetic
    return *library.backward(x, dy, mean, variance, weight, *settings), dy


def _before_activation(dy: Tensor, z: Tensor, activation: Activation) -> Tensor:
    """Return the gradient with respect to z, the activation's input.

    If gradients are enabled, PyTorch can differentiate the result with respect to dy and z.
    """
    if not torch.is_grad_enabled():
        return derivative(dy, z, activation)
    # PyTorch cannot differentiate `silu_backward`, its operator for the gradient of SiLU. So
    # autograd computes dz here, by differentiating the activation itself. The argument
    # `create_graph=True` makes dz differentiable.
    (dz,) = torch.autograd.grad(activate(z, activation), z, dy, create_graph=True)
    return dz


class BatchNorm(_Normalisation):
    """Normalisation with the batch's statistics; it also updates the running statistics, if any."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return y. The arguments are those of `Operands`, the momentum, the `Options`, and the
        function that `engines.forward` returns for them.
        """
        *operands, momentum, options, run = arguments
        x, _, weight, bias, *_ = operands
        y, mean, variance, mask = run(operands, momentum)
        ctx.set_materialize_grads(False)
        kept = order = None
        if mask is not None:
            # The order of x's axes in memory is saved as a tensor, because a checkpoint that
            # recomputes the forward pass replaces only saved tensors.
            order = _order_in_memory(x.stride())
        elif bias is not None and options.activation is not None:
            # The backward pass of an activation other than a ReLU reads the bias. Autograd cannot
            # save a bias that was made in inference mode, but PyTorch's layer accepts such a bias,
            # so a copy is saved.
            kept = bias.clone() if bias.is_inference() else bias
        ctx.save_for_backward(x, mask, weight, kept, mean, variance, order)
        ctx.options = options
        return y


class BatchNormRelu(BatchNorm):
    """`BatchNorm` with a ReLU."""


class BatchNormAddRelu(BatchNorm):
    """`BatchNorm` with a residual and a ReLU."""


class BatchNormActivation(BatchNorm):
    """`BatchNorm` with another activation."""


class BatchNormInference(_Normalisation):
    """Normalisation with given, constant statistics and without an activation."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return y. The arguments are those of `Operands`, residual None, the `Options`, and the
        function that `engines.forward` returns for them.
        """
        *operands, options, run = arguments
        x, _, weight, _, *statistics = operands
        (y,) = run(operands, 0.0)
        ctx.set_materialize_grads(False)
        # Save copies: autograd does not detect that a later batch updates the running statistics.
        mean, variance = (tensor.detach().clone() for tensor in statistics)
        ctx.save_for_backward(x, None, weight, None, mean, variance, None)
        ctx.options = options
        return y


@functools.lru_cache(maxsize=256)
def _order_in_memory(strides: tuple[int, ...]) -> Tensor:
    """Return the strides of x as a tensor, which is saved together with the mask of a ReLU.

    The bits of a mask are in the memory order of x. Saved-tensor hooks preserve values, but may
    return x in another memory order.
    """
    return torch.tensor(strides, device="cpu")


def _in_order(x: Tensor, order: Tensor) -> Tensor:
    """Return x; if its memory order is not `order`, return a copy in that order."""
    strides = tuple(order.tolist())
    if x.stride() == strides:
        return x
    axes = order_of(torch.empty_strided(x.shape, strides, device="meta"))
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    return x.permute(axes).contiguous().permute(inverse)


def name_of(options: Options, residual: Tensor | None) -> str:
    """Return the name by which a profiler shows a forward pass."""
    name = "batch_norm"
    if options.activation is not None:
        name = "batch_norm_activation"
        if options.activation.name == "relu":
            name = "batch_norm_relu" if residual is None else "batch_norm_add_relu"
    return name if options.training else f"{name}_inference"


def profiled(run: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return `run`, or, while a profiler is enabled, a function that calls `run` and records the
    call.

    A call on plain tensors bypasses the dispatcher, in which the profiler records calls.
    """
    if not profiler._is_profiler_enabled:
        return run

    def call(*arguments: Any) -> Any:
        with torch._C._profiler._RecordFunctionFast(f"backnorm::{name}"):
            return run(*arguments)

    return call


def _shown_as(name: str, cls: type[Function]) -> Any:
    """Let profilers show calls of a class by `name`; return the method `apply` of the class.

    Unlike `Function.apply`, the returned `apply` does not handle transforms of `torch.func`. This
    is no limitation, because the functions of this module are called only if no transform is
    active.
    """
    cls.__name__ = f"backnorm::{name}"
    return super(Function, cls).apply


#: Maps each name that `name_of` can return in training to the function that is called. The function
#: takes the arguments of `BatchNorm.forward` and returns y.
TRAIN = {
    name: _shown_as(name, cls)
    for name, cls in {
        "batch_norm": BatchNorm,
        "batch_norm_relu": BatchNormRelu,
        "batch_norm_add_relu": BatchNormAddRelu,
        "batch_norm_activation": BatchNormActivation,
    }.items()
}
#: The function that is called in inference takes the arguments of `BatchNormInference.forward` and
#: returns y.
freeze = _shown_as("batch_norm_inference", BatchNormInference)
