"""Running statistics where kernels do not update them: in traces and under transforms."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from backnorm.torch import state
from backnorm.torch.checks import TensorValueError
from backnorm.torch.memory import check_moved
from backnorm.torch.statistics import update_running

__all__ = ["move", "transformed"]

_NAMES = "running_mean", "running_var"


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
    if state.transformed():
        transformed(running_mean, running_var, mean, variance, momentum, count)
        return
    rest = 1.0 - momentum
    # A tensor first: for torch.jit.trace counts are tensors of integers, whose ratio has 24 bits.
    unbiased = variance.double() * count / (count - 1)
    running_mean.copy_(running_mean.double() * rest + mean.double() * momentum)
    running_var.copy_(running_var.double() * rest + unbiased * momentum)


def transformed(*arguments: Any) -> Tensor:
    """Update running statistics below all transforms; of running and batch's statistics."""
    nothing: Tensor = MoveRunningStatistics.apply(*arguments)
    return nothing


class MoveRunningStatistics(Function):
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
        for name, axis, of_batch in zip(_NAMES, in_dims[:2], in_dims[2:4], strict=True):
            if axis is None and of_batch is not None:
                raise TensorValueError(
                    name,
                    "would be moved by every element of vmap, but is one for all of them",
                    accepted="a tensor that vmap maps over, or None",
                    hint="torch.func.stack_module_state gives each model its own",
                )
        # All are per channel; where the axis of problems is first in all, it does not matter to
        # what is elementwise.
        moved = [
            _copies(value, info.batch_size) if axis is None else value.movedim(axis, 0)
            for value, axis in zip(inputs[:4], in_dims, strict=False)
        ]
        MoveRunningStatistics.apply(*moved, *inputs[4:])
        return inputs[2].new_empty(0), None


def _copies(tensor: Tensor, size: int) -> Tensor:
    """Return one of each for `size` problems.

    As with PyTorch, of running statistics of which vmap maps over one and not the other, and a
    batch that is the same for all, the other stays as it is.
    """
    return tensor.expand(size, *tensor.shape).clone()
