"""Running statistics: their type, and their update where kernels do not make it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch.checks import TensorValueError
from backnorm.torch.dispatch import is_transformed

__all__ = ["Running", "move", "move_below_transforms", "statistics_type"]

_NAMES = "running_mean", "running_var"


class Running(NamedTuple):
    """Running statistics, shape (C,), and the weight of a batch in their update."""

    mean: Tensor
    variance: Tensor
    momentum: float


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the mean and variance of an x of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def move(running: Running | None, mean: Tensor, variance: Tensor, input: Tensor) -> None:
    """Update running statistics by operators that the dispatcher or transforms know.

    A batch without elements leaves them as they are.
    """
    if running is None or not input.numel():
        return
    mean, variance = mean.detach(), variance.detach()
    count = input.numel() // input.shape[1]
    if is_transformed():
        move_below_transforms(
            running.mean, running.variance, mean, variance, running.momentum, count
        )
        return
    momentum = running.momentum
    # A tensor first: in `torch.jit.trace` counts are tensors of integers, whose ratio has 24 bits.
    unbiased = variance.double() * count / (count - 1)
    running.mean.copy_(running.mean.double() * (1.0 - momentum) + mean.double() * momentum)
    running.variance.copy_(running.variance.double() * (1.0 - momentum) + unbiased * momentum)


def move_below_transforms(*arguments: Any) -> Tensor:
    """Update running statistics below all transforms, where they are memory."""
    empty: Tensor = MoveRunningStatistics.apply(*arguments)
    return empty


class MoveRunningStatistics(Function):
    """An update in place, which returns an empty tensor."""

    @staticmethod
    def forward(
        running_mean: Tensor,
        running_var: Tensor,
        mean: Tensor,
        variance: Tensor,
        momentum: float,
        count: int,
    ) -> Tensor:
        # In float64, rounded once, as in kernels. `data` has a version counter of its own: autograd
        # does not record the update, as in PyTorch, where weights may be views of the same base.
        weights = momentum, momentum * count / (count - 1)
        moves = (running_mean, mean), (running_var, variance)
        for (running, value), weight in zip(moves, weights, strict=True):
            target = running.data
            target.copy_(value.detach().double() * weight + target.double() * (1.0 - momentum))
        return mean.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Return no tangent: running statistics are constants."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int | None]:
        for name, axis, batch_axis in zip(_NAMES, in_dims[:2], in_dims[2:4], strict=True):
            if axis is None and batch_axis is not None:
                raise TensorValueError(
                    name,
                    "would be moved by every element of vmap, but is one for all of them",
                    accepted="a tensor that vmap maps over, or None",
                    hint="torch.func.stack_module_state gives each model its own",
                )
        # The update is elementwise, so the axis of problems may be the first in all tensors.
        moved = [
            # If vmap maps over one of the running statistics and not over the batch, the other one
            # stays as it is, as in PyTorch.
            value.expand(info.batch_size, *value.shape).clone()
            if axis is None
            else value.movedim(axis, 0)
            for value, axis in zip(inputs[:4], in_dims, strict=False)
        ]
        MoveRunningStatistics.apply(*moved, *inputs[4:])
        return inputs[2].new_empty(0), None
