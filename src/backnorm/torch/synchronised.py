"""Batch normalisation in phases: of a batch that lies in several processes, or reproducibly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.arithmetics import Arithmetic
from backnorm.torch import arithmetics, checks, settings, state
from backnorm.torch.exchange import (
    bins_of_all,
    check_count,
    is_first,
    moments_of_all,
    sums_of_all,
)
from backnorm.torch.memory import check_moved, order_in_memory
from backnorm.torch.phases import (
    apply_moments,
    apply_sums,
    binned_moments,
    binned_sums,
    moments,
    refuse_second_order,
    rounded_moments,
    rounded_sums,
    strides_of_mask,
    sums,
)

__all__ = ["batch_norm", "batch_norm_with_moments"]


def batch_norm(
    input: Tensor,
    residual: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *,
    relu: bool,
    ceiling: float | None,
    arithmetic: Arithmetic | None,
    reproducible: bool,
    group: Any,
    layer: str,
) -> Tensor:
    """Normalise this process's part of a batch with the statistics of all parts.

    Every process of the group must call it, and go backward through it, in the same order; parts
    may differ in size, and be empty. The gradients of weight and bias are those of this part, as
    DistributedDataParallel wants them. If they are to be reproducible those of all parts are the
    first process's, and the others' are zero: what is added up is then rounded once.

    Parameters
    ----------
    input, residual, running_mean, running_var, weight, bias, momentum, eps, arithmetic
        As of `functional.batch_norm_add_relu`, in training; all but `input` and `residual` the same
        in all processes.
    relu : bool
    ceiling : float or None
        Of the ReLU, as `rectifiers.settled` returns it.
    reproducible : bool
        Whether results have the same bits however the batch is cut.
    group : ProcessGroup or None
        Of more than one process; None: of this one.
    layer : str
        What to call the layer in an error.

    Raises
    ------
    ArgumentError
        As `functional.batch_norm`. The other processes are not told; they wait for this one until
        their group's timeout.
    SynchronisationError
        If another process ends, or does not come; in all processes, if one of them comes with
        another layer, or with other settings.
    SecondOrderError
        Where its gradients are differentiated.
    """
    checks.check(input, running_mean, running_var, weight, bias, True, residual)
    settings.check_eps(True, eps)
    computed_in = arithmetics.of_call(input.dtype, arithmetic)
    options = eps, relu, ceiling, computed_in, reproducible, group, layer
    y, whole = batch_norm_with_moments(input, residual, weight, bias, *options)
    if running_mean is not None and running_var is not None:
        check_moved(running_mean=running_mean, running_var=running_var)
        _move(running_mean, running_var, whole.detach(), momentum)
    return y


def batch_norm_with_moments(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    relu: bool,
    ceiling: float | None,
    arithmetic: str | None,
    reproducible: bool,
    group: Any,
    layer: str,
) -> tuple[Tensor, Tensor]:
    """Return what `batch_norm` does, and what `phases.moments` does of all elements.

    Arguments have been checked, and the arithmetic chosen.
    """
    if reproducible and group is not None:
        check_count(input.numel() // max(input.shape[1], 1), group)
    options = eps, relu, ceiling, arithmetic, reproducible, group, layer
    results: tuple[Tensor, Tensor] = _Synchronised.apply(input, residual, weight, bias, *options)
    return results


class _Synchronised(Function):
    """y, and the moments of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        relu: bool,
        ceiling: float | None,
        arithmetic: str,
        reproducible: bool,
        group: Any,
        layer: str,
    ) -> tuple[Tensor, Tensor]:
        # The arithmetic may differ: a process with no elements may have another element type.
        settings = f"reproducible={reproducible}, relu={relu}, ceiling={ceiling}, eps={eps}"
        if reproducible:
            bins = binned_moments(x, arithmetic)
            if group is not None:
                bins = bins_of_all(bins, x.shape[1], f"forward, {settings}", layer, group)
            whole = rounded_moments(x, bins)
        else:
            own = moments(x, arithmetic)
            whole = moments_of_all(own, x.shape[1], f"forward, {settings}", layer, group)
        operands = x, residual, weight, bias, whole
        strides = strides_of_mask(x) if relu else None
        y, mean, variance, mask = apply_moments(*operands, eps, relu, arithmetic, ceiling, strides)
        ctx.options = eps, relu, arithmetic, strides, reproducible, settings, layer, group
        ctx.mark_non_differentiable(whole)
        order = None
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
            # A checkpoint that recomputes the forward pass replaces saved tensors alone.
            order = order_in_memory(strides) if relu else None
        ctx.save_for_backward(x, weight, mean, variance, mask, whole, order)
        return y, whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
        if dy is None and ctx.options[-1] is None:
            return (None,) * len(ctx.needs_input_grad)
        # Unpacked once: a checkpoint recomputes them for one look.
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _gradients(ctx, saved, dy)
        if dy is not None and state.batched(dy):
            # The graph of a batch of gradients would be lost.
            refuse_second_order()
        with torch.no_grad():
            gradients = _gradients(ctx, saved, dy)
        x, weight = saved[:2]
        once = iter(_Once.apply(x, dy, weight, *(each for each in gradients if each is not None)))
        return tuple(None if each is None else next(once) for each in gradients)


class _Once(Function):
    """Gradients as functions of what they were computed from, whose derivative is an error.

    `torch.autograd.function.once_differentiable` does so for those of dy alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dy: Tensor | None, weight: Tensor | None, *gradients: Tensor
    ) -> Any:
        return tuple(each.view_as(each) for each in gradients)

    backward = staticmethod(refuse_second_order)


def _gradients(ctx: Any, saved: tuple[Any, ...], dy: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the inputs of `_Synchronised`; `saved` is `ctx.saved_tensors`."""
    eps, relu, arithmetic, strides, reproducible, settings, layer, group = ctx.options
    needs_x, needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    x, weight, mean, variance, mask, whole, order = saved
    if order is not None:
        strides = tuple(order.tolist())
    if dy is None:
        # Other processes may have gradients, of which dx has a part.
        dy = torch.zeros_like(x)
    bits, channels = mask if relu else None, x.shape[1]
    operands, of_all = (x, dy, bits, mean, arithmetic, strides), None
    exchange = channels, f"backward, {settings}", layer, group
    if reproducible:
        bins = binned_sums(*operands)
        if group is not None:
            bins = bins_of_all(bins, *exchange)
        of_all = rounded_sums(x, bins)
        own = of_all if is_first(group) else torch.zeros_like(of_all)
    else:
        own = sums(*operands)
    dx = dresidual = dweight = dbias = None
    if needs_x or needs_residual:
        if of_all is None:
            of_all = torch.cat((sums_of_all(own[:-1], *exchange), whole[-1:]))
        dx, dresidual = apply_sums(
            x, dy, bits, mean, variance, weight, of_all, eps, needs_residual, arithmetic, strides
        )
    if needs_weight:
        assert weight is not None
        # Not by `rsqrt`, which is not rounded in the same way everywhere.
        inverse = 1.0 / torch.sqrt(variance.double() + eps)
        dweight = (own[channels:-1] * inverse).to(weight.dtype)
    if needs_bias:
        dbias = own[:channels].to(mean.dtype if weight is None else weight.dtype)
    gradients = dx if needs_x else None, dresidual if needs_residual else None, dweight, dbias
    return *gradients, *[None] * 7


def _move(running_mean: Tensor, running_var: Tensor, whole: Tensor, momentum: float) -> None:
    """Update running statistics from moments of all elements; without any they stay as they are."""
    channels, count = running_mean.shape[0], whole[-1]
    share = momentum * count.clamp(max=1.0)
    unbiased = whole[channels:-1] * (count / (count - 1.0).clamp(min=1.0))
    moves = (running_mean, whole[:channels]), (running_var, unbiased)
    for running, value in moves:
        # `data` has a version counter of its own: see `statistics.update_running`.
        target = running if torch.compiler.is_compiling() else running.data
        target.copy_(running.double() * (1.0 - share) + value * share)
