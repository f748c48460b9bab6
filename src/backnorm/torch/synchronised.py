"""Batch normalisation in phases: of a batch that lies in several processes, or reproducibly.

PyTorch's operators add a residual and apply an activation after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch import checks, exchange, phases
from backnorm.torch.activations import add_and_activate
from backnorm.torch.dispatch import is_batched
from backnorm.torch.options import Options
from backnorm.torch.phases import refuse_second_order
from backnorm.torch.running_statistics import Running

__all__ = ["ALONE", "Processes", "batch_norm", "batch_norm_with_moments"]


@dataclass(frozen=True)
class Processes:
    """The processes whose parts make up a batch.

    Attributes
    ----------
    group : ProcessGroup or None
        Of more than one process; None: this process alone.
    layer : str
        The name of the layer in an error.
    reproducible : bool
        Whether results have the same bits however the batch is cut.
    """

    group: Any
    layer: str
    reproducible: bool


#: This process, reproducibly.
ALONE = Processes(None, "", True)


def batch_norm(
    input: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running | None,
    options: Options,
    processes: Processes,
) -> Tensor:
    """Normalise this process's part of a batch with the statistics of all parts.

    Every process of the group must call it, and go backward through it, in the same order. Parts
    may differ in size, and be empty. The gradients of weight and bias are those of this part, as
    DistributedDataParallel expects. If they are reproducible, the first process has those of all
    parts and the others have zeros, so that their sum is rounded once.

    Parameters
    ----------
    input, residual, weight, bias
        As in `functional.batch_norm`; weight and bias are the same in all processes.
    running : Running or None
        The same in all processes.
    options : Options
        Of training; the same in all processes.
    processes : Processes

    Raises
    ------
    ArgumentError
        As `functional.batch_norm`. The other processes wait for this one until the timeout of their
        group.
    SynchronisationError
        If another process ends, or does not call the layer; in all processes, if one of them calls
        another layer, or has other settings.
    SecondOrderError
        If its gradients are differentiated.
    """
    mean, variance = (None, None) if running is None else running[:2]
    checks.check(input, residual, weight, bias, mean, variance, True)
    checks.check_residual(residual, input, options.activation)
    y, moments = batch_norm_with_moments(input, weight, bias, options, processes)
    if running is not None:
        _move(running, moments.detach())
    return add_and_activate(y, residual, options.activation)


def batch_norm_with_moments(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: Options,
    processes: Processes,
) -> tuple[Tensor, Tensor]:
    """Return the normalised values, and the result of `phases.moments` of all elements.

    The arguments have been checked.
    """
    if processes.reproducible and processes.group is not None:
        exchange.check_count(input.numel() // max(input.shape[1], 1), processes.group)
    results: tuple[Tensor, Tensor]
    results = _Synchronised.apply(input, weight, bias, options, processes)
    return results


class _Synchronised(Function):
    """The normalised values, and the moments of the whole batch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        options: Options,
        processes: Processes,
    ) -> tuple[Tensor, Tensor]:
        message = _message(x, "forward", options, processes)
        if processes.reproducible:
            bins = phases.binned_moments(x, options.arithmetic)
            if processes.group is not None:
                bins = exchange.bins_of_all(bins, *message)
            moments = phases.rounded_moments(x, bins)
        else:
            moments = phases.moments(x, options.arithmetic)
            moments = exchange.moments_of_all(moments, *message)
        y, mean, variance = phases.apply_moments(
            x, weight, bias, moments, options.eps, options.arithmetic
        )
        ctx.options, ctx.processes = options, processes
        ctx.mark_non_differentiable(moments)
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mean, variance, moments)
        return y, moments

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
        if dy is None and ctx.processes.group is None:
            return (None,) * len(ctx.needs_input_grad)
        # Unpacked once: a checkpoint recomputes saved tensors for one access.
        saved = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return _gradients(ctx, saved, dy)
        if dy is not None and is_batched(dy):
            # The graph of a batch of gradients would be lost.
            refuse_second_order()
        with torch.no_grad():
            gradients = _gradients(ctx, saved, dy)
        x, weight = saved[:2]
        once = iter(_Once.apply(x, dy, weight, *(each for each in gradients if each is not None)))
        return tuple(None if each is None else next(once) for each in gradients)


class _Once(Function):
    """Gradients as functions of x, dy and weight, whose derivative is an error.

    `torch.autograd.function.once_differentiable` makes them functions of dy alone.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dy: Tensor | None, weight: Tensor | None, *gradients: Tensor
    ) -> Any:
        return tuple(gradient.view_as(gradient) for gradient in gradients)

    backward = staticmethod(refuse_second_order)


def _message(
    x: Tensor, direction: str, options: Options, processes: Processes
) -> tuple[int, str, str, Any]:
    """Return the channels, description, layer and group of an exchange."""
    # The arithmetic may differ: a process without elements may have another element type.
    description = f"{direction}, reproducible={processes.reproducible}, eps={options.eps}"
    return x.shape[1], description, processes.layer, processes.group


def _gradients(ctx: Any, saved: tuple[Any, ...], dy: Tensor | None) -> tuple[Any, ...]:
    """Return the gradients of the inputs of `_Synchronised`; `saved` is `ctx.saved_tensors`."""
    options, processes = ctx.options, ctx.processes
    needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    x, weight, mean, variance, moments = saved
    if dy is None:
        # Other processes may have gradients, and dx a part of them.
        dy = torch.zeros_like(x)
    message, channels, total = _message(x, "backward", options, processes), x.shape[1], None
    if processes.reproducible:
        bins = phases.binned_sums(x, dy, mean, options.arithmetic)
        if processes.group is not None:
            bins = exchange.bins_of_all(bins, *message)
        total = phases.rounded_sums(x, bins)
        local = total if exchange.is_first(processes.group) else torch.zeros_like(total)
    else:
        local = phases.sums(x, dy, mean, options.arithmetic)
    dx = dweight = dbias = None
    if needs_x:
        if total is None:
            total = torch.cat((exchange.sums_of_all(local[:-1], *message), moments[-1:]))
        dx = phases.apply_sums(
            x, dy, mean, variance, weight, total, options.eps, options.arithmetic
        )
    if needs_weight:
        assert weight is not None
        # `rsqrt` is not rounded in the same way on every machine.
        inverse = 1.0 / torch.sqrt(variance.double() + options.eps)
        dweight = (local[channels:-1] * inverse).to(weight.dtype)
    if needs_bias:
        dbias = local[:channels].to(mean.dtype if weight is None else weight.dtype)
    return dx, dweight, dbias, None, None


def _move(running: Running, moments: Tensor) -> None:
    """Update running statistics from moments of all elements; without any they do not change."""
    channels, count = running.mean.shape[0], moments[-1]
    weight = running.momentum * count.clamp(max=1.0)
    unbiased = moments[channels:-1] * (count / (count - 1.0).clamp(min=1.0))
    moves = (running.mean, moments[:channels]), (running.variance, unbiased)
    for statistic, value in moves:
        # `data` has a version counter of its own: see `running_statistics`.
        target = statistic if torch.compiler.is_compiling() else statistic.data
        target.copy_(statistic.double() * (1.0 - weight) + value * weight)
