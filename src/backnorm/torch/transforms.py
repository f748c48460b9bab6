"""Differentiation beyond the first backward: twice, forward, and under torch.func.

Functions that are each other's derivatives, around the operators of `library`. Batch normalisation
in training is a function of x, weight and bias; mean and variance are passed along, but are
functions of x, and no gradient goes to them.

The Jacobian of y in x is symmetric, and so is the Hessian of <dy, y>: forward mode needs no other
operators than reverse mode.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.errors import BacknormError
from backnorm.torch import batching, library

__all__ = [
    "UnsupportedTransformError",
    "allow_in_graph",
    "backward",
    "forward",
    "inference",
]

Gradients = tuple[Tensor | None, ...]


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.forward`; y is differentiable in every mode."""
    _refuse_forward_mode_twice()
    y, mean, variance = _Forward.apply(x, weight, bias, eps)
    return y, mean, variance


def inference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """As `kernels.inference`; y is differentiable in every mode, but not in mean or variance."""
    _refuse_forward_mode_twice()
    # A later batch in training moves the running statistics without telling autograd.
    mean, variance = mean.detach().clone(), variance.detach().clone()
    y: Tensor = _Inference.apply(x, mean, variance, weight, bias, eps)
    return y


def backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `kernels.backward`; the gradients are differentiable once more."""
    dx, dweight, dbias = _Backward.apply(x, dy, mean, variance, weight, eps, training)
    return dx, dweight, dbias


def _refuse_forward_mode_twice() -> None:
    """Raise under two forward modes: PyTorch (2.13) then loses the second derivative of functions.

    (The tangent of the tangent that an autograd.Function returns is 0, whatever it computes.)
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1:
        raise UnsupportedTransformError(
            "PyTorch cannot differentiate forward mode by forward mode where functions bring their "
            "own derivative, as batch normalisation by backnorm does; take reverse mode for one of "
            "the two (torch.func.jacrev, grad or vjp; torch.func.hessian does)"
        )


def allow_in_graph() -> bool:
    """Have a compiler put `forward` and `inference` into its graph as they are.

    It would look into them and lose what they say of derivatives. The registration wants
    Dynamo imported, which takes longer than importing us: so it is Dynamo that calls this, when it
    comes across a call of it (and takes the result as a constant).
    """
    torch.compiler.allow_in_graph([forward, inference])
    return True


allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


class UnsupportedTransformError(BacknormError, NotImplementedError):
    """A combination of transforms was asked for that would give wrong derivatives."""


class _Forward(Function):
    """x, weight, bias -> y, mean, variance."""

    vmap = staticmethod(batching.rule(lambda *inputs: _Forward.apply(*inputs)))

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return library.batch_norm(x, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, ctx.eps = inputs
        _, mean, variance = output
        ctx.mark_non_differentiable(mean, variance)
        _save(ctx, x, mean, variance, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Gradients:
        x, mean, variance, weight = ctx.saved_tensors
        dx, dweight, dbias = backward(x, dy, mean, variance, weight, ctx.eps, True)
        return dx, _needed(ctx, 1, dweight), _needed(ctx, 2, dbias), None

    @staticmethod
    def jvp(
        ctx: Any, tx: Tensor | None, tweight: Tensor | None, tbias: Tensor | None, _: Any
    ) -> tuple[Tensor | None, None, None]:
        x, mean, variance, weight = ctx.saved_tensors
        moved, scaled = None, None
        if tx is not None:
            moved = backward(x, tx, mean, variance, weight, ctx.eps, True)[0]
        if tweight is not None or tbias is not None:
            scaled = forward(x, *_scale(tweight, tbias), ctx.eps)[0]
        return _sum(moved, scaled), None, None


class _Inference(Function):
    """x, mean, variance, weight, bias -> y."""

    vmap = staticmethod(batching.rule(lambda *inputs: _Inference.apply(*inputs)))

    @staticmethod
    def forward(
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        return library.batch_norm_inference(x, mean, variance, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, mean, variance, weight, _, ctx.eps = inputs
        _save(ctx, x, mean, variance, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Gradients:
        x, mean, variance, weight = ctx.saved_tensors
        dx, dweight, dbias = backward(x, dy, mean, variance, weight, ctx.eps, False)
        return dx, None, None, _needed(ctx, 3, dweight), _needed(ctx, 4, dbias), None

    @staticmethod
    def jvp(
        ctx: Any,
        tx: Tensor | None,
        _mean: Any,
        _variance: Any,
        tweight: Tensor | None,
        tbias: Tensor | None,
        _: Any,
    ) -> Tensor | None:
        x, mean, variance, weight = ctx.saved_tensors
        moved, scaled = None, None
        if tx is not None:
            moved = backward(x, tx, mean, variance, weight, ctx.eps, False)[0]
        if tweight is not None or tbias is not None:
            scaled = inference(x, mean, variance, *_scale(tweight, tbias), ctx.eps)
        return _sum(moved, scaled)


class _Backward(Function):
    """x, dy, mean, variance, weight -> dx, dweight, dbias."""

    vmap = staticmethod(batching.rule(lambda *inputs: _Backward.apply(*inputs)))

    @staticmethod
    def forward(
        x: Tensor,
        dy: Tensor,
        mean: Tensor,
        variance: Tensor,
        weight: Tensor | None,
        eps: float,
        training: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return library.batch_norm_backward(x, dy, mean, variance, weight, eps, training)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, dy, mean, variance, weight, ctx.eps, ctx.training = inputs
        ctx.set_materialize_grads(False)
        _save(ctx, x, dy, mean, variance, weight)

    @staticmethod
    def backward(
        ctx: Any, ddx: Tensor | None, ddweight: Tensor | None, ddbias: Tensor | None
    ) -> Gradients:
        gx, gdy, gweight = _DoubleBackward.apply(
            *ctx.saved_tensors, ddx, ddweight, ddbias, ctx.eps, ctx.training
        )
        return gx, gdy, None, None, _needed(ctx, 4, gweight), None, None

    @staticmethod
    def jvp(
        ctx: Any,
        tx: Tensor | None,
        tdy: Tensor | None,
        _mean: Any,
        _variance: Any,
        tweight: Tensor | None,
        _eps: Any,
        _training: Any,
    ) -> Gradients:
        x, dy, mean, variance, weight = ctx.saved_tensors
        settings = ctx.eps, ctx.training
        # Linear in dy; and in the rest the Hessian of <dy, y>, times the tangents.
        linear: Gradients = (None, None, None)
        if tdy is not None:
            linear = backward(x, tdy, mean, variance, weight, *settings)
        if tx is None and tweight is None:
            return linear
        gx, _, gweight = _DoubleBackward.apply(
            x, dy, mean, variance, weight, tx, tweight, None, *settings
        )
        tdbias = torch.zeros_like(gweight) if linear[2] is None else linear[2]
        return _sum(linear[0], gx), _sum(linear[1], gweight), tdbias


class _DoubleBackward(Function):
    """What `_Backward` takes, and gradients of what it returns -> gradients of x, dy, weight."""

    vmap = staticmethod(batching.rule(lambda *inputs: _DoubleBackward.apply(*inputs)))

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        return library.batch_norm_double_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        library.refuse_third_order()

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> NoReturn:
        library.refuse_third_order()


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


def _needed(ctx: Any, position: int, gradient: Tensor) -> Tensor | None:
    """Return the gradient of an input that may be absent, if the input wants one."""
    return gradient if ctx.needs_input_grad[position] else None


def _scale(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias, the weight being 0 if it is absent (rather than 1)."""
    if weight is not None:
        return weight, bias
    assert bias is not None
    return torch.zeros_like(bias), bias


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one + other
