"""Batch normalisation in phases: of a batch that lies in several processes, or reproducibly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.arithmetics import Arithmetic
from backnorm.torch import arithmetics, checks, settings
from backnorm.torch.exchange import bins_of_all, check_count, is_first, moments_of_all, sums_of_all
from backnorm.torch.memory import check_moved
from backnorm.torch.phases import (
    apply_moments,
    apply_sums,
    binned_moments,
    binned_sums,
    moments,
    rounded_moments,
    rounded_sums,
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
        If another process ends, or does not come.
    """
    checks.check(input, running_mean, running_var, weight, bias, True, residual)
    settings.check_eps(True, eps)
    computed_in = arithmetics.of_call(input.dtype, arithmetic)
    how = eps, relu, ceiling, computed_in, reproducible, group, layer
    y, whole = batch_norm_with_moments(input, residual, weight, bias, *how)
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
    how = eps, relu, ceiling, arithmetic, reproducible, group, layer
    found: tuple[Tensor, Tensor] = _Synchronised.apply(input, residual, weight, bias, *how)
    return found


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
        if reproducible:
            bins = binned_moments(x, arithmetic)
            if group is not None:
                check_count(x.numel() // max(x.shape[1], 1), group)
                bins = bins_of_all(bins, x.shape[1], group, layer)
            whole = rounded_moments(x, bins)
        else:
            whole = moments_of_all(moments(x, arithmetic), group, layer)
        given = x, residual, weight, bias, whole
        y, mean, variance, mask = apply_moments(*given, eps, relu, arithmetic, ceiling)
        ctx.save_for_backward(x, weight, mean, variance, mask, whole)
        ctx.how = eps, relu, arithmetic, reproducible, group, layer
        ctx.mark_non_differentiable(whole)
        return y, whole

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
        x, weight, mean, variance, mask, whole = ctx.saved_tensors
        eps, relu, arithmetic, reproducible, group, layer = ctx.how
        needs_x, needs_residual, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        bits, channels = mask if relu else None, x.shape[1]
        operands, of_all = (x, dy, bits, mean), None
        if reproducible:
            bins = binned_sums(*operands, arithmetic)
            if group is not None:
                bins = bins_of_all(bins, channels, group, layer)
            of_all = rounded_sums(x, bins)
            own = of_all if is_first(group) else torch.zeros_like(of_all)
        else:
            own = sums(*operands, arithmetic)
        dx = dresidual = dweight = dbias = None
        if needs_x or needs_residual:
            if of_all is None:
                of_all = torch.cat((sums_of_all(own[:-1], group, layer), whole[-1:]))
            dx, dresidual = apply_sums(
                x, dy, bits, mean, variance, weight, of_all, eps, needs_residual, arithmetic
            )
        if needs_weight:
            assert weight is not None
            # Not by `rsqrt`, which is not rounded in the same way everywhere.
            inverse = 1.0 / torch.sqrt(variance.double() + eps)
            dweight = (own[channels:-1] * inverse).to(weight.dtype)
        if needs_bias:
            dbias = own[:channels].to(mean.dtype if weight is None else weight.dtype)
        found = dx if needs_x else None, dresidual if needs_residual else None, dweight, dbias
        return *found, *[None] * 7


def _move(running_mean: Tensor, running_var: Tensor, whole: Tensor, momentum: float) -> None:
    """Update running statistics from moments of all elements; without any they stay as they are."""
    channels, count = running_mean.shape[0], whole[-1]
    share = momentum * count.clamp(max=1.0)
    unbiased = whole[channels:-1] * (count / (count - 1.0).clamp(min=1.0))
    moves = (running_mean, whole[:channels]), (running_var, unbiased)
    for running, value in moves:
        running.copy_(running.double() * (1.0 - share) + value * share)
