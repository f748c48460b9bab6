"""Batch normalisation in phases: for a batch split over processes, for reproducible sums, and with
a mask (`masks`).

Each pass reduces the elements of this process to two numbers per channel, exchanges these numbers
with the other processes (`exchange`), and computes y or dx from the combined numbers. Between the
phases, the moments or sums of C channels are one tensor of 2C + 1 float64 numbers on x's device.
The last number is the number of elements of a channel. Reproducible sums are int64 numbers
(`backnorm.reproducible_sums`) until they have been added up over all processes.

`torch.compile` sees three operators: one computes the forward pass, one computes the sums of the
backward pass, and one computes dx. PyTorch's operators add a residual and apply an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from backnorm import weighted
from backnorm.errors import BacknormError
from backnorm.executable import compute
from backnorm.interfaces import Results
from backnorm.options import Options
from backnorm.reproducible_sums import bin_rows, check_count, moments_of, sums_of
from backnorm.torch import composed, masks
from backnorm.torch.activations import add_and_activate
from backnorm.torch.checks import Operands, TensorTypeError, check, check_device, check_tensor
from backnorm.torch.dispatch import is_batched, is_transformed, is_watched
from backnorm.torch.engines import engine_of
from backnorm.torch.exchange import Exchange
from backnorm.torch.memory import check_memory, contiguous, inverse_deviation, statistics_type
from backnorm.torch.options import arithmetic_of
from backnorm.torch.registry import register


class SecondOrderError(BacknormError, NotImplementedError):
    """The gradients cannot be differentiated again, because the batch is in several processes, or
    because sums are reproducible.
    """


@dataclass(frozen=True)
class Processes:
    """The processes over which a batch is spread: each has a part of the batch.

    Attributes
    ----------
    group : ProcessGroup or None
        A group of more than one process; None: this process alone.
    layer : str
        The name of the layer in errors.
    reproducible : bool
        Whether results have the same bits for every division of the batch.
    """

    group: Any
    layer: str
    reproducible: bool


#: The `Processes` of a reproducible layer that is not synchronised: its whole batch is in this
#: process.
ALONE = Processes(None, "", True)


# Each function below computes one phase of a forward or backward pass. `group` is the name of a
# process group. If `group` is None, the whole batch is in this process.


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None,
    reproducible: bool,
    layer: str,
    group: str | None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y and the whole batch's moments: means, biased variances, number of elements."""
    engine, exchange = engine_of(x), None
    options = Options(eps, arithmetic=arithmetic_of(x.dtype, arithmetic), reproducible=reproducible)
    if mask is not None:
        weighted.check_weights("mask", mask, torch)
    reduced = weighted.reduce_counted(x, mask, (1,), options, engine.reduce, torch)
    moments = _message(*reduced)
    if group is not None:
        # `settings` is a text that must be equal in all processes. It does not contain the
        # arithmetic. The arithmetic depends on the element type, and the empty x of a process
        # without elements may have another element type than the x of other processes.
        settings = f"{layer}, {x.shape[1]} channels, forward, {reproducible=}, {eps=}"
        exchange = Exchange(group, settings, moments)
    if reproducible:
        bins, count = _bins(x, moments, exchange)
        # On a GPU, these operations do not make the host wait for the device.
        moments = torch.cat((*moments_of(bins, count, torch), count))
    elif exchange is not None:
        moments = exchange.moments()
    if mask is not None and (x.numel() or group is not None):
        masks.check_count(moments[-1])
    mean, variance, _ = engine.parts(moments)
    operands, sums = (x, None, weight, bias), (mean, variance)
    y, *_ = compute("apply_forward", operands, options, arrays=engine.TENSORS, sums=sums)
    return y, moments


def _sums(
    x: Tensor,
    dy: Tensor,
    moments: Tensor,
    eps: float,
    arithmetic: str | None,
    reproducible: bool,
    layer: str,
    group: str | None,
) -> tuple[Tensor, Tensor]:
    """Return two tensors. Each of the two has the sums of dy and of dy * (x - mean), and the number
    of elements.

    The first tensor is for the gradients of weight and bias in this process. If `reproducible` is
    false, the first tensor has the sums of this process alone. If `reproducible` is true, the first
    tensor has the sums of all processes in the first process, and zeros in every other process. The
    second tensor always has the sums of all processes; dx is computed from it.
    """
    computed_in, exchange = arithmetic_of(x.dtype, arithmetic), None
    options = Options(arithmetic=computed_in, reproducible=reproducible)
    mean, _ = _statistics(x, _check_message("moments", moments, x))
    local = _message(*engine_of(x).reduce("reduce", (x, dy, None, mean), options))
    if group is not None:
        settings = f"{layer}, {x.shape[1]} channels, backward, {reproducible=}, {eps=}"
        exchange = Exchange(group, settings, local)
    if not reproducible:
        return local, local.clone() if exchange is None else exchange.sums()
    bins, count = _bins(x, local, exchange)
    total = torch.cat((*sums_of(bins, torch), count))
    is_first = exchange is None or exchange.rank == 0
    return total.clone() if is_first else torch.zeros_like(total), total


def _gradient(
    x: Tensor,
    dy: Tensor,
    weight: Tensor | None,
    moments: Tensor,
    sums: Tensor,
    eps: float,
    arithmetic: str | None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return dx, given the moments of the whole batch and the sums over all processes."""
    engine, options = engine_of(x), Options(eps, arithmetic=arithmetic_of(x.dtype, arithmetic))
    mean, variance = _statistics(x, _check_message("moments", moments, x))
    sums = _check_message("sums", sums, x)
    if mask is not None:
        # The sums are those of all elements; dx has the quotients of them and the sum of weights.
        sums = torch.cat((sums[:-1] / moments[-1], torch.ones_like(sums[-1:])))
    sum_dy, sum_dy_xmu, count = engine.parts(sums)
    operands: Sequence[Any] = (x, dy, mean, variance, weight)
    if mask is not None and mask.is_floating_point():
        operands = [None if each is None else each.double() for each in operands]
        options = options._replace(arithmetic="float64")
    elements, gradient, *channels = operands

    def run(dy: Tensor, training: bool) -> Results:
        return compute(
            "apply", (elements, dy, None, *channels), options._replace(training=training),
            arrays=engine.TENSORS, sums=(sum_dy, sum_dy_xmu), count=count,
        )  # fmt: skip

    dx: Tensor
    dx, _ = run(gradient, True) if mask is None else weighted.apply(run, gradient, mask, torch)
    return dx.to(x.dtype)


def _check_message(name: str, message: Tensor, x: Tensor) -> Tensor:
    """Return moments or sums as a contiguous tensor; raise for a wrong device, type or shape."""
    check_tensor("x", x)
    check_device(name, message, "x", x)
    check_memory(message, name)
    # If x has no channel axis, any shape of the message passes this check. Such an x is rejected
    # later, when the kernel checks the shape and type of x.
    shape = (2 * x.shape[1] + 1,) if x.dim() > 1 else message.shape
    if message.dtype is not torch.float64 or message.shape != shape:
        raise TensorTypeError(
            name, "must have two numbers per channel of {x}, then the number of elements",
            came=f"{message.dtype}, shape {tuple(message.shape)}",
            accepted="float64, shape (2C + 1,)",
        )  # fmt: skip
    return contiguous(message)


def _message(sums: Tensor, count: int) -> Tensor:
    """Return sums and the number of elements as one tensor, without waiting for a GPU."""
    return torch.cat((sums.flatten(), sums.new_full((1,), count)))


def _bins(x: Tensor, local: Tensor, exchange: Exchange | None) -> tuple[Tensor, Tensor]:
    """Return two tensors: the bins of the sums over all processes, and, as a float64, the number of
    elements that a channel has in all processes.
    """
    rows = bin_rows(x.element_size())
    message = local if exchange is None else exchange.bins(rows)
    return message[:-1].view(rows, -1), message[-1:].double()


def _statistics(x: Tensor, moments: Tensor) -> tuple[Tensor, ...]:
    """Return mean and variance, each rounded once from float64 to the statistics type of x."""
    return moments[:-1].to(statistics_type(x.dtype)).chunk(2)


# Derivatives, and the operators.


class _BatchNorm(Function):
    """The derivative of the forward pass.

    The class has no rule for vmap or forward mode, so PyTorch raises an error if it applies either
    of them to the class. If forward mode were applied to the operator itself, the tangent would be
    lost without an error.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, *ctx.settings, mask = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, mask, output[1])

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        eps, arithmetic, reproducible, layer, group = ctx.settings
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        # Unpack the saved tensors even if dy is None. If the layer is in a checkpoint
        # (`torch.utils.checkpoint`), unpacking makes PyTorch recompute all layers of the
        # checkpoint.
        x, weight, mask, moments = ctx.saved_tensors
        if dy is None and group is None:
            return (None,) * 9
        if dy is None:
            # This process must still take part in the exchange: other processes may have a dy, and
            # the sums of their dy contribute to dx of this process.
            dy = torch.zeros_like(x)
        if mask is not None and torch.is_grad_enabled() and group is None and not reproducible:
            gradients = composed.backward((x, dy, None, None, weight), eps, True, mask)
            wanted = zip(gradients, ctx.needs_input_grad[:3], strict=True)
            return *(each if need else None for each, need in wanted), *[None] * 6
        if torch.is_grad_enabled() and is_batched(dy):
            # If dy is batched (``is_grads_batched``), PyTorch cannot differentiate the gradients
            # that are computed here. Without this check, PyTorch would raise no error when a caller
            # tries to differentiate them.
            _refuse_second_order()
        group = group if needs_x or reproducible else None
        local, total = _reduce(x, dy, moments, eps, arithmetic, reproducible, layer, group)
        dx = dweight = dbias = None
        if needs_x:
            dx = _apply(x, dy, weight, moments, total, eps, arithmetic, mask)
        sum_dy, sum_dy_xmu = local[:-1].chunk(2)
        _, variance = _statistics(x, moments)
        if needs_weight:
            dweight = (sum_dy_xmu * inverse_deviation(variance, eps)).to(weight.dtype)
        if needs_bias:
            dbias = sum_dy.to(variance.dtype if weight is None else weight.dtype)
        return dx, dweight, dbias, *[None] * 6


def _refuse_second_order(*_: Any) -> NoReturn:
    raise SecondOrderError(
        "batch normalisation over several processes, or with reproducible sums, is differentiable "
        "once, not twice; backnorm.torch.revert(model) restores a model's original layers"
    )


def _fake_forward(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)


def _fake_sums(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(x)[1], _fake_forward(x)[1]


def _fake_gradient(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x)


_batch_norm = register("synchronised", _forward, _fake_forward, function=_BatchNorm)
_reduce = register("synchronised_sums", _sums, _fake_sums, backward=_refuse_second_order)
_apply = register("synchronised_gradient", _gradient, _fake_gradient, backward=_refuse_second_order)


# The functions.


def batch_norm(
    operands: Operands,
    momentum: float,
    options: Options,
    processes: Processes,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalise this process's part of a batch with the statistics of all parts.

    If there are several calls of this function, all processes of the group must make them in the
    same order, and must run the backward passes of the calls in the same order. Parts may differ in
    size, and may be empty. The gradients of weight and bias are those of this part, as
    DistributedDataParallel expects. With reproducible sums, the first process has the gradients of
    all parts and the others have zeros, so that the sum of the gradients is rounded once.

    Parameters
    ----------
    operands : Operands
        As in `functional.batch_norm`; weight, bias and running statistics are the same in all
        processes.
    momentum : float
    options : Options
        The options of training; the same in all processes.
    processes : Processes
    mask : Tensor, shape (N, 1, ...), optional
        See `masks`.

    Raises
    ------
    ArgumentError
        As `functional.batch_norm`. The other processes then wait for this process until their
        group's timeout.
    SynchronisationError
        If another process ends, or does not call the layer. If a process calls another layer, or
        has other settings, all processes raise this error.
    SecondOrderError
        If gradients of the result are differentiated.
    """
    input, residual, weight, bias, *statistics = operands
    check(operands, options)
    y, moments = batch_norm_with_moments(input, weight, bias, options, processes, mask)
    if operands.running_mean is not None:
        _move(statistics, momentum, moments)
    return add_and_activate(y, residual, options.activation)


def batch_norm_with_moments(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    options: Options,
    processes: Processes,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the normalised values of this process, and the moments of the elements of all
    processes.

    The caller has checked the arguments.
    """
    if processes.reproducible and processes.group is not None:
        # Here, no process knows the sizes of the other parts. So each process assumes that all
        # parts are as large as its own part, and checks how many elements per channel the whole
        # batch would then have.
        count = input.numel() // max(input.shape[1], 1)
        check_count("input", dist.get_world_size(processes.group) * count)
    layer, group = processes.layer, None
    if processes.group is not None:
        group = processes.group.group_name
        if options.activation is not None:
            # The caller of this function computes the activation. But all processes must use the
            # same activation, so its name and ceiling are added to `layer`, which is part of the
            # text that the processes compare.
            name, ceiling = options.activation
            layer = f"{layer}, {name}" + ("" if ceiling is None else f" up to {ceiling}")
    run = _BatchNorm.apply if is_transformed() else _batch_norm
    results: tuple[Tensor, Tensor] = run(
        input, weight, bias, options.epsilon, options.arithmetic,
        processes.reproducible, layer, group, mask,
    )  # fmt: skip
    return results


def _move(statistics: Sequence[Any], momentum: float, moments: Tensor) -> None:
    """Update running statistics with the moments of the whole batch, unless it is empty."""
    (mean, variance), count = moments[:-1].chunk(2), moments[-1]
    weight = momentum * count.clamp(max=1.0)
    unbiased = variance * (count / torch.where(count > 1.0, count - 1.0, 1.0))
    for statistic, value in zip(statistics, (mean, unbiased), strict=True):
        # Writing to `data` does not change the tensor's version counter. If the counter changed,
        # autograd could treat a weight that shares memory with the running statistics as changed,
        # too (see `library.MoveRunningStatistics`).
        target = statistic if is_watched(statistic) else statistic.data
        target.copy_(statistic.double() * (1.0 - weight) + value * weight)
