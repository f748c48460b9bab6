"""Running statistics where kernels do not update them: in traces and under transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch import state
from backnorm.torch.checks import TensorValueError
from backnorm.torch.memory import check_moved
from backnorm.torch.statistics import update_running

__all__ = ["move"]


def move(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    input: Tensor,
) -> None:
    """Update running statistics by operators that the dispatcher or transforms know."""
    if running_mean is None or running_var is None or not input.numel():
        return
    check_moved(running_mean=running_mean, running_var=running_var)
    mean, variance = mean.detach(), variance.detach()
    count = input.numel() // input.shape[1]
    if state.transformed() and not torch.compiler.is_compiling():
        _Move.apply(running_mean, running_var, mean, variance, momentum, count)
        return
    rest = 1.0 - momentum
    # A tensor first: for torch.jit.trace counts are tensors of integers, whose ratio has 24 bits.
    unbiased = variance.double() * count / (count - 1)
    running_mean.copy_(running_mean.double() * rest + mean.double() * momentum)
    running_var.copy_(running_var.double() * rest + unbiased * momentum)


class _Move(Function):
    """An update in place, below all transforms, where running statistics are memory."""

    @staticmethod
    def forward(
        running_mean: Tensor,
        running_var: Tensor,
        mean: Tensor,
        variance: Tensor,
        momentum: float,
        count: int,
    ) -> Tensor:
        check_moved(running_mean=running_mean, running_var=running_var)
        update_running(running_mean, running_var, mean, variance, momentum, count)
        return mean.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        """Return no tangent: running statistics are constants."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int | None]:
        for name, axis in zip(("running_mean", "running_var"), in_dims, strict=False):
            if axis is None:
                raise TensorValueError(
                    name,
                    "would be moved by every element of vmap, but is one for all of them",
                    accepted="a tensor that vmap maps over, or None",
                    hint="torch.func.stack_module_state gives each model its own",
                )
        # All are per channel; the first axis of problems does not matter to what is elementwise.
        moved = [
            value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
            for value, axis in zip(inputs[:4], in_dims, strict=False)
        ]
        _Move.apply(*moved, *inputs[4:])
        return inputs[2].new_empty(0), None
