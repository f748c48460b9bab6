"""Each operation once: how it is computed, of what shapes, what it saves, and its derivatives.

A class is an operation, as PyTorch's functions with derivatives are classes. `_operation` makes of
it an operator that the dispatcher knows (``torch.ops.backnorm.*``), which is what `torch.compile`,
`torch.export`, fake tensors and modes that watch operators see, and lets the class compute by it:
the class itself is what `torch.func` and forward mode differentiate. No operator writes to an
argument; running statistics are updated elsewhere (`moving`).

What elements are computed in, `arithmetic`, is decided by the caller and part of the graph; without
it, as in graphs of before there was a choice, it is the element type's own, and what Inductor makes
of an operator has its own rule (`lowering`). The second order is computed in float64.

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
from torch.library import custom_op

from backnorm.errors import ArgumentError, BacknormError
from backnorm.layout import mask_size
from backnorm.torch import batching, forward_mode, kernels
from backnorm.torch.arithmetics import own
from backnorm.torch.checks import check_device, in_words, not_a_tensor
from backnorm.torch.classes import in_memory
from backnorm.torch.memory import check_before_pytorch
from backnorm.torch.rectifiers import derivative, settled
from backnorm.torch.statistics import statistics_type

__all__ = [
    "ThirdOrderError",
    "backward",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_double_backward",
    "batch_norm_inference",
    "forward",
    "in_one_place",
    "in_order_of_inputs",
    "in_our_words",
    "inference",
    "lazily",
    "like_parameter",
    "like_statistics",
    "unpack_mask",
    "whole_mask",
]

Gradients = tuple[Tensor | None, ...]

_LIBRARY = torch.library.Library("backnorm", "IMPL")

#: The operations' names for tensors, and the operators'.
_WORDS = {"gamma": "weight", "beta": "bias", "ddgamma": "ddweight", "ddbeta": "ddbias"}


class ThirdOrderError(BacknormError, NotImplementedError):
    """The third derivative of batch normalisation was asked for."""


class _Operation(Function):
    """A function with derivatives, and the operator of the dispatcher that computes it."""

    operator: ClassVar[Any]


def _operation(
    name: str, has_mask: Callable[..., bool] = lambda *_: False, of_x: tuple[int, ...] = ()
) -> Callable[[type[Any]], type[Any]]:
    """Register a class as an operator of the dispatcher; the rest is for `batching.rule`.

    The class has `kernel`, with the types of the operator, and `fake`, which returns new tensors
    like the kernel's; and `setup_context`, `backward` and `jvp`, as `Function` wants them.
    """

    def register(cls: type[Any]) -> type[Any]:
        kernel = in_our_words(cls.kernel)
        operator = custom_op(f"backnorm::{name}", kernel, mutates_args=())
        operator.register_fake(in_one_place(cls.fake, kernel))
        operator.register_autograd(cls.backward, setup_context=cls.setup_context)
        operator.register_vmap(batching.rule(operator, has_mask, of_x))
        lazily(name)
        cls.operator = operator
        cls.forward = operator
        cls.jvp = staticmethod(forward_mode.differentiable(cls.jvp))
        cls.vmap = staticmethod(batching.rule(cls.apply, has_mask, of_x))
        return cls

    return register


def lazily(name: str) -> None:
    """Let a kernel have tensors that are yet to be negated, or lazily zero, as they are.

    PyTorch would copy them before, and reads beyond the end of those whose storage was shortened.
    """
    for key in ("Negative", "ZeroTensor"):
        _LIBRARY.impl(name, torch.library.fallthrough_kernel, key)


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


def in_one_place(fake: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a fake kernel that raises where tensors are not all on one device.

    The dispatcher calls it for any tensor on the meta device, wherever the others are.
    """
    names = list(inspect.signature(kernel).parameters)
    place = names.index("x")

    def call(*arguments: Any) -> Any:
        for name, each in zip(names, arguments, strict=False):
            if isinstance(each, Tensor):
                check_device(name, each, "x", arguments[place])
        return fake(*arguments)

    return call


@_operation("batch_norm_double_backward")
class BatchNormDoubleBackward(_Operation):
    """The gradients of x, dy and weight, given those of the gradients without a ReLU."""

    kernel = staticmethod(kernels.double_backward)

    @staticmethod
    def fake(x: Tensor, _dy: Any, _mean: Any, _variance: Any, weight: Any, *_: Any) -> Gradients:
        return torch.empty_like(x), torch.empty_like(x), like_parameter(x, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise ThirdOrderError(
            "batch normalisation by backnorm is differentiable twice, not three times; "
            "backnorm.torch.revert(model) gives a model PyTorch's layers back"
        )

    jvp = backward


@_operation("batch_norm_backward", has_mask=lambda x, dy, mask, *_: mask is not None)
class BatchNormBackward(_Operation):
    """The gradients of x, weight, bias and residual, the last empty if there is none.

    With the mask of `BatchNorm`, those of a ReLU too.
    """

    @staticmethod
    def kernel(
        x: Tensor,
        dy: Tensor,
        mask: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        eps: float,
        training: bool,
        has_residual: bool,
        arithmetic: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        how = eps, training, has_residual, own(x.dtype, arithmetic)
        given = x, dy, mask, mean, variance, weight
        dx, dweight, dbias, dresidual = kernels.backward(*given, *how)
        return dx, dweight, dbias, x.new_empty(0) if dresidual is None else dresidual

    @staticmethod
    def fake(
        x: Tensor, _dy: Any, _mask: Any, _mean: Any, _variance: Any, weight: Any,
        _eps: float, _training: bool, has_residual: bool, _arithmetic: Any = None,
    ) -> Gradients:  # fmt: skip
        dresidual = torch.empty_like(x) if has_residual else x.new_empty(0)
        dweight, dbias = like_parameter(x, weight), like_parameter(x, weight)
        return torch.empty_like(x), dweight, dbias, dresidual

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.eps, ctx.training, ctx.has_residual, ctx.arithmetic = inputs
        if not ctx.has_residual:
            ctx.mark_non_differentiable(output[3])
        ctx.set_materialize_grads(False)
        _save(ctx, *tensors)

    @staticmethod
    def backward(
        ctx: Any,
        ddx: Tensor | None,
        ddweight: Tensor | None,
        ddbias: Tensor | None,
        ddresidual: Tensor | None,
    ) -> Gradients:
        x, dy, mask, mean, variance, weight = ctx.saved_tensors
        through_relu = _through_relu(mask, x)
        check_before_pytorch(ddresidual=ddresidual)
        gx, gdy, gweight = BatchNormDoubleBackward.apply(
            x, through_relu(dy), mean, variance, weight,
            ddx, ddweight, ddbias, ctx.eps, ctx.training,
        )  # fmt: skip
        gdy = through_relu(_sum(gdy, ddresidual))
        gweight = gweight if ctx.needs_input_grad[5] else None
        return gx, gdy, None, None, None, gweight, None, None, None, None

    @staticmethod
    def jvp(
        ctx: Any,
        tx: Tensor | None,
        tdy: Tensor | None,
        _mask: Any,
        _mean: Any,
        _variance: Any,
        tweight: Tensor | None,
        *_: Any,
    ) -> Gradients:
        x, dy, mask, mean, variance, weight = forward_mode.primals(ctx)
        tdx, tdweight, tdbias, tdresidual = None, None, None, None
        # Results are linear in dy; and in the rest the Hessian of <dy, y>, times the tangents.
        if tdy is not None:
            how = ctx.eps, ctx.training, ctx.has_residual, ctx.arithmetic
            tdx, tdweight, tdbias, tdresidual = BatchNormBackward.apply(
                x, tdy, mask, mean, variance, weight, *how
            )
        if tx is not None or tweight is not None:
            gx, _, gweight = BatchNormDoubleBackward.apply(
                x, _through_relu(mask, x)(dy), mean, variance, weight,
                tx, tweight, None, ctx.eps, ctx.training,
            )  # fmt: skip
            tdx, tdweight = _sum(tdx, gx), _sum(tdweight, gweight)
            # PyTorch wants the tangent of a differentiable result even where it is 0.
            tdbias = torch.zeros_like(gweight) if tdbias is None else tdbias
            tdresidual = torch.zeros_like(x) if tdresidual is None else tdresidual
        return tdx, tdweight, tdbias, tdresidual if ctx.has_residual else None


class _Normalisation(_Operation):
    """The derivatives of y, which training and given statistics share.

    Inputs begin with x, residual, weight and bias.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Gradients:
        needed = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(needed)
        x, mask, mean, variance, weight = ctx.saved_tensors
        how = ctx.eps, ctx.training, needed[1], ctx.arithmetic
        gradients = BatchNormBackward.apply(x, dy, mask, mean, variance, weight, *how)
        return *in_order_of_inputs(needed, *gradients), *[None] * (len(needed) - 4)

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
            given = x, tx, None, mean, variance, weight
            moved = BatchNormBackward.apply(*given, ctx.eps, ctx.training, False, ctx.arithmetic)[0]
        if tweight is not None or tbias is not None:
            # What is absent is 0, rather than 1.
            tweight = torch.zeros_like(tbias) if tweight is None else tweight
            how = ctx.eps, False, ctx.arithmetic, None
            if ctx.training:
                scaled = BatchNorm.apply(x, None, tweight, tbias, *how)[0]
            else:
                scaled = BatchNormInference.apply(x, None, tweight, tbias, mean, variance, *how)
        tangent = _sum(moved, scaled)
        if tangent is None:
            tangent = torch.zeros_like(x)
        elif not ctx.training:
            forward_mode.check_constants(*others[:2])
        return (tangent, None, None, None) if ctx.training else tangent


@_operation("batch_norm", has_mask=lambda *inputs: inputs[5], of_x=(1, 2))
class BatchNorm(_Normalisation):
    """y, mean and biased variance of the batch, and the mask of y's elements that count.

    Those are the positive ones below the ceiling. The mask is empty without ReLU.
    """

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
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        given, how = (x, residual, weight, bias, eps), (relu, ceiling, own(x.dtype, arithmetic))
        y, mean, variance, mask = kernels.forward(*given, None, *how)
        return y, mean, variance, whole_mask(mask, x)

    @staticmethod
    def fake(
        x: Tensor, _residual: Any, _weight: Any, _bias: Any, _eps: float, relu: bool, *_: Any
    ) -> tuple[Tensor, ...]:
        mask = x.new_empty(mask_size(x.numel()) if relu else 0, dtype=torch.uint8)
        return torch.empty_like(x), like_statistics(x), like_statistics(x), mask

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, _, weight, _, ctx.eps, relu, ctx.arithmetic, _ = inputs
        _, mean, variance, mask = output
        ctx.training = True
        ctx.mark_non_differentiable(mean, variance, mask)
        ctx.set_materialize_grads(False)
        _save(ctx, x, mask if relu else None, mean, variance, weight)


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
        how = eps, relu, ceiling, own(x.dtype, arithmetic)
        return kernels.inference(x, residual, weight, bias, mean, variance, *how)

    @staticmethod
    def fake(x: Tensor, *_: Any) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, weight, _, mean, variance, ctx.eps, relu, ctx.arithmetic, ceiling = inputs
        ctx.training, ctx.ceiling = False, settled(ceiling, x.dtype)
        ctx.set_materialize_grads(False)
        # What is between the bounds in y is what a mask would say.
        _save(ctx, x, output if relu else None, mean, variance, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Gradients:
        needed = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(needed)
        x, y, mean, variance, weight = ctx.saved_tensors
        if y is not None:
            check_before_pytorch(dy=dy, y=y)
            dy = derivative(dy, y, ctx.ceiling)
        how = ctx.eps, False, False, ctx.arithmetic
        dx, dweight, dbias, _ = BatchNormBackward.apply(x, dy, None, mean, variance, weight, *how)
        return *in_order_of_inputs(needed, dx, dweight, dbias, dy), *[None] * (len(needed) - 4)


# For the dispatcher.
batch_norm = BatchNorm.operator
batch_norm_inference = BatchNormInference.operator
batch_norm_backward = BatchNormBackward.operator
batch_norm_double_backward = BatchNormDoubleBackward.operator

# The same for autograd, forward mode and transforms.
forward, inference, backward = BatchNorm.apply, BatchNormInference.apply, BatchNormBackward.apply


def _fake_unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.bool)


#: A mask as booleans, in shape and memory as x.
unpack_mask = custom_op("backnorm::unpack_mask", in_our_words(kernels.unpack_mask), mutates_args=())
lazily("unpack_mask")
unpack_mask.register_fake(in_one_place(_fake_unpack_mask, kernels.unpack_mask))


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


def whole_mask(mask: Tensor | None, x: Tensor) -> Tensor:
    """Return the mask of a forward pass as operators give it: empty without one.

    What is behind the bits may be anything. Who compares results wants them to be equal.
    """
    if mask is None:
        return x.new_empty(0, dtype=torch.uint8)
    mask[-mask_size(0) :].zero_()
    return mask


def like_statistics(x: Tensor) -> Tensor:
    """Return a new tensor like a mean of x."""
    return x.new_empty((x.shape[1],), dtype=statistics_type(x.dtype))


def like_parameter(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return a new tensor like a gradient of `weight`."""
    return like_statistics(x) if weight is None else weight.new_empty((x.shape[1],))


def _through_relu(mask: Tensor | None, x: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the derivative of the ReLU: what is not in the mask becomes 0. Without one, itself."""
    if mask is None:
        return lambda gradient: gradient
    positive = unpack_mask(mask, x)

    def through(gradient: Tensor) -> Tensor:
        check_before_pytorch(dy=gradient)
        return torch.where(positive, gradient, 0.0)

    return through


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two tensors, either of which may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return one + other
