"""The rules of vmap: a batch of problems is one problem with as many times the channels.

Channels are independent of each other, so B problems of C channels are one of B * C channels,
exactly and in one call. A tensor that vmap does not map over is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from backnorm.torch.memory import check_before_pytorch

__all__ = ["rule"]

Rule = Callable[..., tuple[Any, Any]]


def rule(function: Callable[..., Any], of_x: tuple[int, ...] = ()) -> Rule:
    """Return the rule of `function`, as `torch.library` and `torch.autograd.Function` want it.

    Its tensors are recognised by their rank: what has one axis is per channel, what has more has
    the channels on the second.

    `of_x` are the places of the results that depend on x alone, which is the first argument: where
    all problems have the same x, these are the same for all, too.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if not size:
            # Results have a shape all the same: that of any problem.
            arguments = tuple(map(_one, arguments, in_dims))
        found: list[tuple[Tensor, int | None]] = []
        for place, (result, axis) in enumerate(_together(function, size or 1, in_dims, arguments)):
            if place in of_x and in_dims[0] is None:
                found.append((result.select(axis, 0), None))
            else:
                found.append((result if size else result.narrow(axis, 0, 0), axis))
        if len(found) == 1:
            return found[0]
        results, axes = zip(*found, strict=True)
        return results, axes

    return vmap


def _together(
    function: Callable[..., Any], size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> list[tuple[Tensor, int]]:
    """Return results of all problems computed as one, and where the axis of problems is in each."""
    merged = [
        _merge(argument, axis, size) if isinstance(argument, Tensor) else argument
        for argument, axis in zip(arguments, in_dims, strict=True)
    ]
    return [_split(result, size) for result in _as_tuple(function(*merged))]


def _as_tuple(results: Any) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _one(argument: Any, axis: int | None) -> Any:
    """Return an argument whose axis of problems is empty for one problem of ones."""
    if axis is None:
        return argument
    return argument.new_ones([*argument.shape[:axis], 1, *argument.shape[axis + 1 :]])


def _merge(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """Return a tensor whose channels are those of all problems, problem by problem."""
    check_before_pytorch(argument=tensor)
    rank = tensor.dim() - (axis is not None)
    channels = 0 if rank == 1 else 1
    if axis is not None:
        return tensor.movedim(axis, channels).flatten(channels, channels + 1)
    shape = tensor.shape
    tensor = tensor.unsqueeze(channels).expand(*shape[:channels], size, *shape[channels:])
    return tensor.flatten(channels, channels + 1)


def _split(tensor: Tensor, size: int) -> tuple[Tensor, int]:
    """Undo `_merge`, and say where the axis of problems is."""
    channels = 0 if tensor.dim() == 1 else 1
    return tensor.unflatten(channels, (size, tensor.shape[channels] // size)), channels
