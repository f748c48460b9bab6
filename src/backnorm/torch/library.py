"""Batch normalisation, its gradient and its second-order gradient, as differentiable operators.

The operators are registered with PyTorch, so that `torch.compile`, `torch.export`, fake tensors and
dispatch modes (such as FLOP counters) see each call of an operator. The subclasses of PyTorch's
`Function` define derivatives for autograd, forward mode and `torch.func`. An operator only
normalises: PyTorch's operators add a residual and apply an activation, and `move` updates the
running statistics. Eager calls on tensors in memory do not use this module (see `eager`).

If the argument `arithmetic` is None, an operator computes in the default arithmetic of the element
type, so that a graph does not depend on the `backnorm.arithmetic` block in which it runs.
Formulas that Inductor compiles compute in float32 by default (see `lowering`).

The forward operators also return the batch's mean and variance, for the backward pass. The mean and
variance that they return are not differentiable. If batched gradients (``is_grads_batched``) or
second-order gradients may be differentiated again, they are not computed by backnorm's kernels, but
composed of PyTorch's operators (`composed`).

The Jacobian of y with respect to x is symmetric, and so is the Hessian of <dy, y>, the scalar
product of dy and y. Therefore forward mode uses the operators of reverse mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.options import Options
from backnorm.torch import composed, engines
from backnorm.torch.checks import Operands, TensorValueError
from backnorm.torch.dispatch import is_batched, is_transformed
from backnorm.torch.options import arithmetic_of
from backnorm.torch.registry import register

Gradients = tuple[Tensor | None, ...]


# The functions below implement the registered operators by calling the kernels.


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(x, True, eps, arithmetic)
    y, mean, variance, _ = engines.run("forward", (x, None, weight, bias, None, None), options)
    return y, mean, variance


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
    y: Tensor
    (y,) = engines.run("inference", (x, None, mean, variance, weight, bias), options)
    return y


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
    operands = x, dy, None, mean, variance, weight
    dx, dweight, dbias, _ = engines.run("backward", operands, options)
    return dx, dweight, dbias


def _options(x: Tensor, training: bool, eps: float, arithmetic: str | None) -> Options:
    return Options(eps, training=training, arithmetic=arithmetic_of(x.dtype, arithmetic))


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
        gx, gdy, gweight = double_backward(ctx.saved_tensors, cotangents, ctx.eps, ctx.training)
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
        x, dy, *channels = _primals(ctx)
        tdx, tdweight, tdbias = None, None, None
        # dx, dweight and dbias are the gradients of <dy, y>, the sum of all dy * y. They are linear
        # in dy, so for a tangent of dy they are computed with the tangent in place of dy. For
        # tangents of x and weight, the Hessian of <dy, y> is multiplied by these tangents, and the
        # product is added.
        if tdy is not None:
            options = ctx.eps, ctx.training, ctx.arithmetic
            tdx, tdweight, tdbias = BatchNormBackward.apply(x, tdy, *channels, *options)
        if tx is not None or tweight is not None:
            saved, tangents = (x, dy, *channels), (tx, tweight, None)
            gx, _, gweight = double_backward(saved, tangents, ctx.eps, ctx.training)
            tdx, tdweight = _sum(tdx, gx), _sum(tdweight, gweight)
            # PyTorch requires the tangent of every differentiable result, even if it is 0.
            tdbias = torch.zeros_like(gweight) if tdbias is None else tdbias
        return tdx, tdweight, tdbias


class _Normalisation(Function):
    """Base class with the derivatives of y, for batch statistics and for given statistics.

    In every subclass, the first three arguments of `forward` are x, weight and bias.
    """

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Gradients:
        needed = ctx.needs_input_grad
        # Saved tensors are unpacked even if dy is None, because activation checkpointing
        # (`torch.utils.checkpoint`) recomputes its layers only when a saved tensor is unpacked.
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
        x, mean, variance, weight = _primals(ctx)
        by_x, by_parameters = None, None
        if tx is not None:
            options = ctx.eps, ctx.training, ctx.arithmetic
            by_x = BatchNormBackward.apply(x, tx, mean, variance, weight, *options)[0]
        if tweight is not None or tbias is not None:
            # An absent weight is the constant 1, so its tangent is 0.
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
            _check_constants(*others[:2])
        return (tangent, None, None) if ctx.training else tangent


class BatchNorm(_Normalisation):
    """The operator that returns y, and the mean and biased variance of the batch."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps, ctx.arithmetic = inputs
        _, mean, variance = output
        ctx.training = True
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        _save(ctx, x, mean, variance, weight)


class BatchNormInference(_Normalisation):
    """The operator that returns y, normalised with given statistics."""

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


def _check_constants(tmean: Tensor | None, tvariance: Tensor | None) -> None:
    """Raise if running statistics have a tangent, as PyTorch does."""
    for name, tangent in (("running_mean", tmean), ("running_var", tvariance)):
        if tangent is not None:
            raise TensorValueError(
                name,
                "must not have a tangent, because it is treated as a constant",
                hint=f"pass torch.autograd.forward_ad.unpack_dual({name}).primal",
            )


def _primals(ctx: Any) -> list[Tensor | None]:
    """Return the saved tensors without the tangents of the current level of forward mode."""
    # The public function `forward_ad.unpack_dual` is not used, because it finds no current level
    # while a compiler traces.
    return [
        None if tensor is None else torch._VF._unpack_dual(tensor, level=0).primal
        for tensor in ctx.saved_tensors
    ]


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of two tensors, either of which may be absent."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


# The operators.

batch_norm = register(
    "batch_norm", _forward, ("data", "statistics", "statistics"), function=BatchNorm
)
batch_norm_inference = register(
    "batch_norm_inference", _inference, ("data",), function=BatchNormInference
)
batch_norm_backward = register(
    "batch_norm_backward",
    _backward,
    ("data", "parameter", "parameter"),
    function=BatchNormBackward,
)
batch_norm_double_backward = register(
    "batch_norm_double_backward",
    engines.double_backward,
    ("data", "data", "parameter"),
    backward=_no_derivative,
)


# The functions `forward`, `inference` and `backward` take the arguments of the operators above.
# Every transform of `torch.func` can differentiate these functions.


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the batch's mean and its biased variance; only y has a gradient."""
    results: tuple[Tensor, Tensor, Tensor] = BatchNorm.apply(*arguments)
    return results


def inference(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    *settings: Any,
) -> Tensor:
    """Return y, normalised with given statistics, which are constants."""
    # Copies of the statistics are saved for the backward pass. The originals may be running
    # statistics: a later batch updates them, and autograd does not detect this. The copies keep the
    # tangents of the originals, so that the operation can raise an error for statistics with
    # tangents.
    with torch.no_grad():
        mean, variance = mean.clone(), variance.clone()
    y: Tensor = BatchNormInference.apply(x, weight, bias, mean, variance, *settings)
    return y


def backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return differentiable gradients of x, weight and bias.

    PyTorch cannot differentiate a `Function` that computes batched gradients
    (``is_grads_batched``), but it can differentiate its own operators. So if batched gradients may
    be differentiated later, they are computed by PyTorch's operators.
    """
    _, dy, *_ = arguments
    if torch.is_grad_enabled() and is_batched(dy):
        *saved, eps, training, _arithmetic = arguments
        return composed.backward(saved, eps, training)
    gradients: tuple[Tensor, Tensor, Tensor] = BatchNormBackward.apply(*arguments)
    return gradients


def double_backward(
    saved: Sequence[Any], cotangents: Sequence[Any], eps: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given `cotangents`, the gradients of the results of
    `backward`. `saved` are x, dy, mean, variance and weight.

    If the returned gradients may be differentiated again, or if a transform is active, PyTorch's
    operators compute the gradients; otherwise a kernel does.
    """
    if torch.is_grad_enabled() or is_transformed():
        return composed.double_backward(saved, cotangents, eps, training)
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = batch_norm_double_backward(*saved, *cotangents, eps, training)
    return gradients


# Running statistics.


def move(
    operands: Operands, mean: Tensor, variance: Tensor, count: Any = None, *, momentum: float
) -> None:
    """Update the running statistics, if any, by operators that the dispatcher and transforms see.

    `count` is the number of elements of a channel, if not all elements count. An empty batch does
    not change the running statistics.
    """
    input, *_, running_mean, running_var = operands
    if running_mean is not None and running_var is not None and input.numel():
        count = input.numel() // input.shape[1] if count is None else count
        # The product begins with the float64 variance, so that every operation is in float64. Under
        # `torch.jit.trace`, `count` is an integer tensor, and `count / (count - 1)` alone would be
        # a float32.
        unbiased = variance.detach().double() * count / (count - 1)
        update = move_below_transforms if is_transformed() else _move
        update(running_mean, running_var, mean.detach(), unbiased, momentum)


def _move(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, unbiased: Tensor, momentum: float
) -> None:
    # The new statistics are computed in float64 and rounded once, as in the kernels.
    running_mean.copy_(running_mean.double() * (1.0 - momentum) + mean.double() * momentum)
    running_var.copy_(running_var.double() * (1.0 - momentum) + unbiased * momentum)


def move_below_transforms(*arguments: Any) -> Tensor:
    """Update the running statistics in place. Transforms of `torch.func` wrap tensors; this
    function writes to the plain tensors inside the wrappers.
    """
    empty: Tensor = MoveRunningStatistics.apply(*arguments)
    return empty


class MoveRunningStatistics(Function):
    """Call `_move` on the tensors inside the wrappers of transforms; return an empty tensor."""

    @staticmethod
    def forward(running_mean: Tensor, running_var: Tensor, *arguments: Any) -> Tensor:
        # Writing to `data` does not change the tensor's version counter. As in PyTorch, autograd
        # must not detect that running statistics are updated. (A weight may be a view of the same
        # base tensor as the running statistics, and then shares their version counter. If the
        # counter increased, autograd would treat the weight as changed, too.)
        _move(running_mean.data, running_var.data, *arguments)
        return running_mean.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Return no tangent: running statistics are constants."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int | None]:
        names = "running_mean", "running_var"
        for name, axis, batch_axis in zip(names, in_dims[:2], in_dims[2:4], strict=True):
            if axis is None and batch_axis is not None:
                raise TensorValueError(
                    name,
                    "must be mapped by vmap, since every element of the batch updates it",
                    accepted="a tensor that vmap maps over, or None",
                    hint="torch.func.stack_module_state gives each model its own",
                )
        # The update treats each element alone, so it does not matter where the axis is that vmap
        # maps over. This axis is moved to the front of every tensor.
        moved = [
            # If vmap maps over only one of the two running statistics, the other is copied here,
            # and only the copy is updated, as in PyTorch.
            value.expand(info.batch_size, *value.shape).clone()
            if axis is None
            else value.movedim(axis, 0)
            for value, axis in zip(inputs[:4], in_dims, strict=False)
        ]
        MoveRunningStatistics.apply(*moved, *inputs[4:])
        return inputs[2].new_empty(0), None
