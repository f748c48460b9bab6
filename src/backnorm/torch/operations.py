"""Each operation once: how it is computed, of what shapes, what it saves, and its derivatives.

A class is an operation, as PyTorch's functions with derivatives are classes. `_operation` makes of
it an operator that the dispatcher knows (``torch.ops.backnorm.*``), which is what `torch.compile`,
`torch.export`, fake tensors and modes that watch operators see, and lets the class compute by it:
the class itself is what `torch.func` and forward mode differentiate. No operator writes to an
argument; running statistics are updated elsewhere (`moving`).

What elements are computed in, `arithmetic`, is decided by the caller and part of the graph; without
it, as in graphs of before there was a choice, it is the element type's own, and what Inductor makes
of an operator has its own rule (`lowering`). The second order is computed in float64.

A derivative of the second order, and of batched gradients, is composed of PyTorch's operators
(`composed`). Operators keep the mask of a ReLU as booleans in the shape of y, which a compiler or a
hook may lay out anew; the bits that kernels write are read in eager calls alone (`autograd`).

Batch normalisation in training is a function of x, residual, weight and bias; mean and variance are
passed along, but are functions of x, and no gradient goes to them.

The Jacobian of y in x is symmetric, and so is the Hessian of <dy, y>: forward mode needs no other
operators than reverse mode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function
from torch.library import (
    infer_schema,
    register_autograd,
    register_fake,
    register_kernel,
    register_vmap,
)

from backnorm.errors import ArgumentError
from backnorm.torch import batching, composed, forward_mode, kernels, state
from backnorm.torch.arithmetics import own
from backnorm.torch.checks import check_device, in_words, not_a_tensor
from backnorm.torch.classes import in_memory
from backnorm.torch.memory import check_before_pytorch
from backnorm.torch.rectifiers import passing, settled
from backnorm.torch.statistics import statistics_type

__all__ = [
    "backward",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_double_backward",
    "batch_norm_inference",
    "define",
    "double_backward",
    "forward",
    "in_order_of_inputs",
    "in_our_words",
    "inference",
    "like_parameter",
    "like_statistics",
    "masked",
]

Gradients = tuple[Tensor | None, ...]

_LIBRARY = torch.library.Library("backnorm", "FRAGMENT")

#: The operations' names for tensors, and the operators'.
_WORDS = {"gamma": "weight", "beta": "bias", "ddgamma": "ddweight", "ddbeta": "ddbias"}


class _Operation(Function):
    """A function with derivatives, and the operator of the dispatcher that computes it."""

    operator: ClassVar[Any]


def _operation(name: str, of_x: tuple[int, ...] = ()) -> Callable[[type[Any]], type[Any]]:
    """Register a class as an operator of the dispatcher; the rest is for `batching.rule`.

    The class has `kernel`, with the types of the operator, and `fake`, which returns new tensors
    like the kernel's; and `setup_context`, `backward` and `jvp`, as `Function` wants them.
    """

    def register(cls: type[Any]) -> type[Any]:
        operator = define(name + infer_schema(cls.kernel, mutates_args=()), cls.kernel, cls.fake)
        register_autograd(operator, cls.backward, setup_context=cls.setup_context)
        register_vmap(operator, batching.rule(operator, of_x))
        cls.operator = operator
        cls.forward = operator
        cls.jvp = staticmethod(forward_mode.differentiable(cls.jvp))
        cls.vmap = staticmethod(batching.rule(cls.apply, of_x))
        return cls

    return register


def define(
    schema: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    *layout: torch.Tag,
    reference: str = "x",
) -> Any:
    """Define an operator and return it; `layout` is what Inductor is to know of its operands'.

    All tensors must be on the device of the one called `reference`.
    """
    # `torch.library.custom_op` does the same, and takes 3 us more in every call (AMD EPYC, Zen 3).
    name, _, _ = schema.partition("(")
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *layout))
    # On all devices, and not traced by Dynamo, which looks into Python that runs below an operator.
    register_kernel(f"backnorm::{name}", None, in_our_words(kernel), lib=_LIBRARY)
    # A kernel has tensors that are yet to be negated, or lazily zero, as they are. PyTorch would
    # copy them before, and reads beyond the end of those whose storage was shortened.
    for key in ("Negative", "ZeroTensor"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    operator = getattr(torch.ops.backnorm, name).default
    register_fake(operator, in_one_place(fake, kernel, reference))
    return operator


def in_our_words(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose errors have its own names for tensors, and name one that is missing.

    It takes tensors of subclasses, too.
    """
    parameters = list(inspect.signature(kernel).parameters.values())
    required = [(k, each.name) for k, each in enumerate(parameters) if each.annotation == "Tensor"]

    @functools.wraps(kernel)
    def call(*arguments: Any) -> Any:
        for k, name in required:
            # The dispatcher lets None pass.
            if arguments[k] is None:
                raise not_a_tensor(name, None)
        try:
            plain = [
                in_memory(each, parameter.name) if isinstance(each, Tensor) else each
                # The dispatcher leaves out what is the default.
                for each, parameter in zip(arguments, parameters, strict=False)
            ]
            return kernel(*plain)
        except ArgumentError as error:
            raise in_words(error, _WORDS) from None

    return call


def in_one_place(
    fake: Callable[..., Any], kernel: Callable[..., Any], reference: str = "x"
) -> Callable[..., Any]:
    """Return a fake kernel that raises where tensors are not all on the device of `reference`.

    The dispatcher calls it for any tensor on the meta device, wherever the others are.
    """
    names = list(inspect.signature(kernel).parameters)
    place = names.index(reference)

    def call(*arguments: Any) -> Any:
        for name, each in zip(names, arguments, strict=False):
            if isinstance(each, Tensor):
                check_device(name, each, reference, arguments[place])
        return fake(*arguments)

    return call


def _fake_double_backward(
    x: Tensor, dy: Tensor, _mean: Any, _variance: Any, weight: Any, *_: Any
) -> Gradients:
    return torch.empty_like(x), torch.empty_like(x), like_parameter(x, weight)


def _no_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "torch.ops.backnorm.batch_norm_double_backward has no derivative; "
        "backnorm.torch.batch_norm has derivatives of every order"
    )


#: The gradients of x, dy and weight, given those of what `BatchNormBackward` returns. It has no
#: derivative: see `double_backward`.
batch_norm_double_backward = define(
    "batch_norm_double_backward" + infer_schema(kernels.double_backward, mutates_args=()),
    kernels.double_backward,
    _fake_double_backward,
)
register_autograd(batch_norm_double_backward, _no_derivative)
register_vmap(batch_norm_double_backward, batching.rule(batch_norm_double_backward))


def double_backward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given those of what `BatchNormBackward` returns.

    Kernels compute them if no derivative of them can be asked for; else PyTorch's operators, which
    have derivatives of every order.
    """
    if torch.is_grad_enabled() or state.transformed():
        return composed.double_backward(x, *arguments)
    gradients: tuple[Tensor, Tensor, Tensor] = batch_norm_double_backward(x, *arguments)
    return gradients


@_operation("batch_norm_backward")
class BatchNormBackward(_Operation):
    """The gradients of x, weight and bias."""

    @staticmethod
    def kernel(
        x: Tensor,
        dy: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        eps: float,
        training: bool,
        arithmetic: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = eps, training, False, own(x.dtype, arithmetic)
        return kernels.backward(x, dy, None, mean, variance, weight, *options)[:3]

    @staticmethod
    def fake(
        x: Tensor, _dy: Any, _mean: Any, _variance: Any, weight: Any, *_: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty_like(x), like_parameter(x, weight), like_parameter(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.eps, ctx.training, ctx.arithmetic = inputs
        ctx.set_materialize_grads(False)
        _save(ctx, *tensors)

    @staticmethod
    def backward(
        ctx: Any, ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
    ) -> Gradients:
        cotangents = ddx, ddweight, ddbias
        if all(each is None for each in cotangents):
            return (None,) * 8
        gx, gdy, gweight = double_backward(*ctx.saved_tensors, *cotangents, ctx.eps, ctx.training)
        return gx, gdy, None, None, gweight if ctx.needs_input_grad[4] else None, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        tx: Tensor | None,
        tdy: Tensor | None,
        _mean: Any,
        _variance: Any,
        tweight: Tensor | None,
        *_: Any,
    ) -> Gradients:
        x, dy, *channels = forward_mode.primals(ctx)
        tdx, tdweight, tdbias = None, None, None
        # Results are linear in dy; and in the rest the Hessian of <dy, y>, times the tangents.
        if tdy is not None:
            options = ctx.eps, ctx.training, ctx.arithmetic
            tdx, tdweight, tdbias = BatchNormBackward.apply(x, tdy, *channels, *options)
        if tx is not None or tweight is not None:
            gx, _, gweight = double_backward(
                x, dy, *channels, tx, tweight, None, ctx.eps, ctx.training
            )
            tdx, tdweight = _sum(tdx, gx), _sum(tdweight, gweight)
            # PyTorch wants the tangent of a differentiable result even where it is 0.
            tdbias = torch.zeros_like(gweight) if tdbias is None else tdbias
        return tdx, tdweight, tdbias


def backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    arithmetic: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias, which can be differentiated again.

    PyTorch's batched gradients (``is_grads_batched``) lose the derivative of a `Function`, and keep
    those of PyTorch's operators.
    """
    if torch.is_grad_enabled() and state.batched(dy):
        return composed.backward(x, dy, mean, variance, weight, eps, training)
    gradients: tuple[Tensor, Tensor, Tensor] = BatchNormBackward.apply(
        x, dy, mean, variance, weight, eps, training, arithmetic
    )
    return gradients


class _Normalisation(_Operation):
    """The derivatives of y, which training and given statistics share.

    Inputs begin with x, residual, weight and bias.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Gradients:
        needed = ctx.needs_input_grad
        # Unpacked without dy, too, as PyTorch's are: a checkpoint recomputes its layers then.
        x, mask, mean, variance, weight = ctx.saved_tensors
        if dy is None:
            return (None,) * len(needed)
        if mask is not None:
            dy = masked(dy, mask)
        options = ctx.eps, ctx.training, ctx.arithmetic
        gradients = backward(x, dy, mean, variance, weight, *options)
        return *in_order_of_inputs(needed, *gradients, dy), *[None] * (len(needed) - 4)

    @staticmethod
    def jvp(
        ctx: Any,
        tx: Tensor | None,
        _: Any,
        tweight: Tensor | None,
        tbias: Tensor | None,
        *others: Any,
    ) -> Any:
        # Without residual and ReLU, which `functional` adds where there is forward mode.
        x, _, mean, variance, weight = forward_mode.primals(ctx)
        moved, scaled = None, None
        if tx is not None:
            options = ctx.eps, ctx.training, ctx.arithmetic
            moved = BatchNormBackward.apply(x, tx, mean, variance, weight, *options)[0]
        if tweight is not None or tbias is not None:
            # What is absent is 0, rather than 1.
            tweight = torch.zeros_like(tbias) if tweight is None else tweight
            parameters, last = (None, tweight, tbias), (ctx.eps, False, ctx.arithmetic, None)
            if ctx.training:
                scaled = BatchNorm.apply(x, *parameters, *last)[0]
            else:
                scaled = BatchNormInference.apply(x, *parameters, mean, variance, *last)
        tangent = _sum(moved, scaled)
        if tangent is None:
            tangent = torch.zeros_like(x)
        elif not ctx.training:
            forward_mode.check_constants(*others[:2])
        return (tangent, None, None) if ctx.training else tangent


@_operation("batch_norm", of_x=(1, 2))
class BatchNorm(_Normalisation):
    """y, and mean and biased variance of the batch."""

    @staticmethod
    def kernel(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        relu: bool,
        arithmetic: str | None = None,
        ceiling: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        operands, options = (x, residual, weight, bias, eps), (relu, ceiling)
        return kernels.forward(*operands, None, *options, own(x.dtype, arithmetic))[:3]

    @staticmethod
    def fake(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(x), like_statistics(x), like_statistics(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, weight, _, ctx.eps, relu, ctx.arithmetic, ceiling = inputs
        y, mean, variance = output
        ctx.training = True
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        _save(ctx, x, _mask(y, ceiling) if relu else None, mean, variance, weight)


@_operation("batch_norm_inference")
class BatchNormInference(_Normalisation):
    """y, normalised with given statistics."""

    @staticmethod
    def kernel(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        relu: bool,
        arithmetic: str | None = None,
        ceiling: float | None = None,
    ) -> Tensor:
        options = eps, relu, ceiling, own(x.dtype, arithmetic)
        return kernels.inference(x, residual, weight, bias, mean, variance, *options)

    @staticmethod
    def fake(x: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, weight, _, mean, variance, ctx.eps, relu, ctx.arithmetic, ceiling = inputs
        ctx.training = False
        ctx.set_materialize_grads(False)
        _save(ctx, x, _mask(output, ceiling) if relu else None, mean, variance, weight)


# For the dispatcher.
batch_norm = BatchNorm.operator
batch_norm_inference = BatchNormInference.operator
batch_norm_backward = BatchNormBackward.operator

# The same for autograd, forward mode and transforms.
forward, inference = BatchNorm.apply, BatchNormInference.apply


def in_order_of_inputs(
    needed: tuple[bool, ...], dx: Tensor, dweight: Tensor, dbias: Tensor, dresidual: Tensor | None
) -> Gradients:
    """Return the gradients of x, residual, weight and bias, if these are `needed`.

    An input that is absent needs none.
    """
    return (
        dx if needed[0] else None,
        dresidual if needed[1] else None,
        dweight if needed[2] else None,
        dbias if needed[3] else None,
    )


def like_statistics(x: Tensor) -> Tensor:
    """Return a new tensor like a mean of x."""
    return x.new_empty((x.shape[1],), dtype=statistics_type(x.dtype))


def like_parameter(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return a new tensor like a gradient of `weight`."""
    return like_statistics(x) if weight is None else weight.new_empty((x.shape[1],))


def masked(dy: Tensor, mask: Tensor) -> Tensor:
    """Return the gradient before a ReLU: 0 for the elements that are not in its mask."""
    check_before_pytorch(dy=dy, mask=mask)
    return torch.where(mask, dy, 0.0)


def _mask(y: Tensor, ceiling: float | None) -> Tensor:
    """Return the mask of a ReLU from its result y.

    Booleans in y's shape, not the bits that kernels write: whatever keeps or compiles the graph may
    lay them out anew.
    """
    return passing(y, settled(ceiling, y.dtype))


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two tensors, either of which may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
