"""Batch normalisation, its gradient and the gradient of that, as operators with derivatives.

`torch.compile`, `torch.export`, fake tensors and modes that see every operator call the operators;
autograd, forward mode and `torch.func` differentiate the classes. An operator normalises and does
nothing else: PyTorch's operators add a residual and apply an activation, and `running_statistics`
moves the running statistics. Eager calls on tensors in memory do not come here (`eager`).

The caller decides the arithmetic. Without it an operator computes in the element type's own, so
that a graph means the same wherever it runs; Inductor has a rule of its own (`lowering`).

The batch's mean and variance are results for the backward pass. They are functions of x, and no
gradient flows to them. Derivatives of the second order that are differentiated again, and those of
batched gradients, are composed of PyTorch's operators (`composed`).

The Jacobian of y in x is symmetric, and so is the Hessian of <dy, y>. Forward mode therefore needs
no other operators than reverse mode.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch import composed, kernels
from backnorm.torch.dispatch import is_batched, is_transformed
from backnorm.torch.options import Options, arithmetic_of
from backnorm.torch.registry import Operation, register
from backnorm.torch.running_statistics import statistics_type
from backnorm.torch.transforms import check_constants, primals

__all__ = [
    "TABLE",
    "backward",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_double_backward",
    "batch_norm_inference",
    "double_backward",
    "forward",
    "inference",
    "like_parameter",
    "like_statistics",
]

Gradients = tuple[Tensor | None, ...]


# Kernels and fake kernels of the operators.


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.forward(x, None, weight, bias, None, _options(x, True, eps, arithmetic))[:3]


def _fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return torch.empty_like(x), like_statistics(x), like_statistics(x)


def _inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    arithmetic: str | None = None,
) -> Tensor:
    options = _options(x, False, eps, arithmetic)
    return kernels.inference(x, None, weight, bias, (mean, variance), options)


def _fake_inference(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


def _backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(x, training, eps, arithmetic)
    saved = kernels.Saved(x, weight, mean, variance)
    return kernels.backward(saved, dy, options, has_residual=False)[:3]


def _fake_backward(
    x: Tensor, _dy: Any, _mean: Any, _variance: Any, weight: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), like_parameter(x, weight), like_parameter(x, weight)


def _fake_double_backward(
    x: Tensor, dy: Tensor, _mean: Any, _variance: Any, weight: Any, *_: Any
) -> Gradients:
    return torch.empty_like(x), torch.empty_like(x), like_parameter(x, weight)


def _options(x: Tensor, training: bool, eps: float, arithmetic: str | None) -> Options:
    return Options(training, eps, None, arithmetic_of(x.dtype, arithmetic))


def like_statistics(x: Tensor) -> Tensor:
    """Return a new tensor like a mean of x."""
    return x.new_empty((x.shape[1],), dtype=statistics_type(x.dtype))


def like_parameter(x: Tensor, weight: Tensor | None) -> Tensor:
    """Return a new tensor like a gradient of `weight`."""
    return like_statistics(x) if weight is None else weight.new_empty((x.shape[1],))


# Derivatives.


class BatchNormBackward(Function):
    """The gradients of x, weight and bias, as functions of x, dy and weight."""

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
        x, dy, *channels = primals(ctx)
        tdx, tdweight, tdbias = None, None, None
        # The results are linear in dy. In x and weight: the Hessian of <dy, y> times the tangents.
        if tdy is not None:
            options = ctx.eps, ctx.training, ctx.arithmetic
            tdx, tdweight, tdbias = BatchNormBackward.apply(x, tdy, *channels, *options)
        if tx is not None or tweight is not None:
            gx, _, gweight = double_backward(
                x, dy, *channels, tx, tweight, None, ctx.eps, ctx.training
            )
            tdx, tdweight = _sum(tdx, gx), _sum(tdweight, gweight)
            # PyTorch requires the tangent of a differentiable result even if it is 0.
            tdbias = torch.zeros_like(gweight) if tdbias is None else tdbias
        return tdx, tdweight, tdbias


class _Normalisation(Function):
    """The derivatives of y, which training and given statistics share.

    Inputs begin with x, weight and bias.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Gradients:
        needed = ctx.needs_input_grad
        # Saved tensors are unpacked without dy, too: a checkpoint recomputes its layers then.
        x, mean, variance, weight = ctx.saved_tensors
        if dy is None:
            return (None,) * len(needed)
        options = ctx.eps, ctx.training, ctx.arithmetic
        gradients = backward(x, dy, mean, variance, weight, *options)
        wanted = (g if need else None for g, need in zip(gradients, needed[:3], strict=True))
        return *wanted, *[None] * (len(needed) - 3)

    @staticmethod
    def jvp(
        ctx: Any, tx: Tensor | None, tweight: Tensor | None, tbias: Tensor | None, *others: Any
    ) -> Any:
        x, mean, variance, weight = primals(ctx)
        by_x, by_parameters = None, None
        if tx is not None:
            options = ctx.eps, ctx.training, ctx.arithmetic
            by_x = BatchNormBackward.apply(x, tx, mean, variance, weight, *options)[0]
        if tweight is not None or tbias is not None:
            # An absent weight is 1; the tangent of an absent weight is 0.
            tweight = torch.zeros_like(tbias) if tweight is None else tweight
            if ctx.training:
                by_parameters = BatchNorm.apply(x, tweight, tbias, ctx.eps, ctx.arithmetic)[0]
            else:
                by_parameters = BatchNormInference.apply(
                    x, tweight, tbias, mean, variance, ctx.eps, ctx.arithmetic
                )
        tangent = _sum(by_x, by_parameters)
        if tangent is None:
            tangent = torch.zeros_like(x)
        elif not ctx.training:
            check_constants(*others[:2])
        return (tangent, None, None) if ctx.training else tangent


class BatchNorm(_Normalisation):
    """y, and mean and biased variance of the batch."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps, ctx.arithmetic = inputs
        _, mean, variance = output
        ctx.training = True
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        _save(ctx, x, mean, variance, weight)


class BatchNormInference(_Normalisation):
    """y, normalised with given statistics."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, mean, variance, ctx.eps, ctx.arithmetic = inputs
        ctx.training = False
        ctx.set_materialize_grads(False)
        _save(ctx, x, mean, variance, weight)


def _no_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError(
        "torch.ops.backnorm.batch_norm_double_backward has no derivative; "
        "backnorm.torch.batch_norm has derivatives of every order"
    )


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two tensors, either of which may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


# The table of the operators.

TABLE = (
    Operation(
        "batch_norm",
        _forward,
        _fake_forward,
        function=BatchNorm,
        batched=True,
        results_of_x=(1, 2),
    ),
    Operation(
        "batch_norm_inference",
        _inference,
        _fake_inference,
        function=BatchNormInference,
        batched=True,
    ),
    Operation(
        "batch_norm_backward",
        _backward,
        _fake_backward,
        function=BatchNormBackward,
        batched=True,
    ),
    Operation(
        "batch_norm_double_backward",
        kernels.double_backward,
        _fake_double_backward,
        backward=_no_derivative,
        batched=True,
    ),
)

batch_norm, batch_norm_inference, batch_norm_backward, batch_norm_double_backward = map(
    register, TABLE
)


# The same as functions that every transform differentiates.


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, arithmetic: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and biased variance of the batch, which are constants."""
    results: tuple[Tensor, Tensor, Tensor] = BatchNorm.apply(x, weight, bias, eps, arithmetic)
    return results


def inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    arithmetic: str | None,
) -> Tensor:
    """Return y, normalised with given statistics, which are constants."""
    # A later batch in training moves the running statistics, and autograd does not see it. The
    # copies keep their tangents, which the operation refuses.
    with torch.no_grad():
        mean, variance = mean.clone(), variance.clone()
    y: Tensor = BatchNormInference.apply(x, weight, bias, mean, variance, eps, arithmetic)
    return y


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
    if torch.is_grad_enabled() and is_batched(dy):
        return composed.backward(x, dy, mean, variance, weight, eps, training)
    gradients: tuple[Tensor, Tensor, Tensor] = BatchNormBackward.apply(
        x, dy, mean, variance, weight, eps, training, arithmetic
    )
    return gradients


def double_backward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given those of what `backward` returns.

    A kernel computes them, unless they can be differentiated again.
    """
    if torch.is_grad_enabled() or is_transformed():
        return composed.double_backward(x, *arguments)
    gradients: tuple[Tensor, Tensor, Tensor] = batch_norm_double_backward(x, *arguments)
    return gradients
