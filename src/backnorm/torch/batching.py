"""The rules of vmap: a batch of problems is one problem with as many times the channels.

Channels are independent of each other, so B problems of C channels are one of B * C channels,
exactly and in one call. A tensor that vmap does not map over is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backnorm.torch.memory import check_before_pytorch

__all__ = ["rule"]

Rule = Callable[..., tuple[Any, Any]]


def rule(function: Callable[..., Any], has_mask: Callable[..., bool]) -> Rule:
    """Return the rule of `function`, as `torch.library` and `torch.autograd.Function` want it.

    Its tensors are recognised by their rank: what has one axis is per channel, what has more has
    the channels on the second. The bits of a mask are neither: calls of which `has_mask` says that
    they take or return one are made problem by problem.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if has_mask(*arguments):
            problems = zip(*map(_select, arguments, in_dims, [size] * len(arguments)), strict=True)
            results = zip(*(function(*problem) for problem in problems), strict=True)
            stacked = tuple(torch.stack(result) for result in results)
            return stacked, (0,) * len(stacked)
        merged = [
            _merge(argument, axis, size) if isinstance(argument, Tensor) else argument
            for argument, axis in zip(arguments, in_dims, strict=True)
        ]
        results = function(*merged)
        if isinstance(results, Tensor):
            return _split(results, size)
        split = [_split(result, size) for result in results]
        return tuple(result for result, _ in split), tuple(axis for _, axis in split)

    return vmap


def _select(argument: Any, axis: int | None, size: int) -> tuple[Any, ...]:
    """Return an argument of each problem."""
    if isinstance(argument, Tensor):
        check_before_pytorch(argument=argument)
    return (argument,) * size if axis is None else argument.unbind(axis)


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
