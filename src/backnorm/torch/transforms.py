"""Rules of `torch.func`: batches of problems (vmap), and forward mode.

Channels are independent of each other, so B problems of C channels are one problem of B * C
channels, exactly and in one call. A tensor that vmap does not map over is the same for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from backnorm.torch.checks import TensorValueError

__all__ = ["batching_rule", "check_constants", "differentiable", "primals"]

Rule = Callable[..., tuple[Any, Any]]


def batching_rule(function: Callable[..., Any], results_of_x: tuple[int, ...] = ()) -> Rule:
    """Return the vmap rule of `function`, for `torch.library` and `torch.autograd.Function`.

    A tensor with one axis is per channel; a tensor with more has the channels on the second axis.
    `results_of_x` are the positions of the results that depend on x, the first argument, alone. If
    all problems have the same x, these results are the same for all, too.
    """

    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        if not size:
            # The results of an empty batch have the shape of those of any problem.
            arguments = tuple(map(_with_one_problem, arguments, in_dims))
        batched: list[tuple[Tensor, int | None]] = []
        results = _compute_together(function, size or 1, in_dims, arguments)
        for position, (result, axis) in enumerate(results):
            if position in results_of_x and in_dims[0] is None:
                batched.append((result.select(axis, 0), None))
            else:
                batched.append((result if size else result.narrow(axis, 0, 0), axis))
        if len(batched) == 1:
            return batched[0]
        tensors, axes = zip(*batched, strict=True)
        return tensors, axes

    return vmap


def _compute_together(
    function: Callable[..., Any], size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]
) -> list[tuple[Tensor, int]]:
    """Return the results of all problems, and the axis of problems in each."""
    merged = [
        _merge(argument, axis, size) if isinstance(argument, Tensor) else argument
        for argument, axis in zip(arguments, in_dims, strict=True)
    ]
    results = function(*merged)
    results = (results,) if isinstance(results, Tensor) else results
    return [_split(result, size) for result in results]


def _with_one_problem(argument: Any, axis: int | None) -> Any:
    """Return an argument whose axis of problems is empty for one problem of ones."""
    if axis is None:
        return argument
    return argument.new_ones([*argument.shape[:axis], 1, *argument.shape[axis + 1 :]])


def _merge(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """Return a tensor whose channels are those of all problems, problem by problem."""
    rank = tensor.dim() - (axis is not None)
    channels = 0 if rank == 1 else 1
    if axis is not None:
        return tensor.movedim(axis, channels).flatten(channels, channels + 1)
    shape = tensor.shape
    tensor = tensor.unsqueeze(channels).expand(*shape[:channels], size, *shape[channels:])
    return tensor.flatten(channels, channels + 1)


def _split(tensor: Tensor, size: int) -> tuple[Tensor, int]:
    """Undo `_merge`, and return the axis of problems."""
    channels = 0 if tensor.dim() == 1 else 1
    return tensor.unflatten(channels, (size, tensor.shape[channels] // size)), channels


def differentiable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of forward mode that forward mode can differentiate again.

    PyTorch calls a rule with forward mode off, for all levels at once, and the tangent of its
    result would be 0. `primals` leaves out the current level.
    """

    @functools.wraps(jvp)
    def call(*arguments: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(*arguments)

    return call


def check_constants(tmean: Tensor | None, tvariance: Tensor | None) -> None:
    """Raise for tangents of given statistics, as PyTorch does."""
    for name, tangent in (("running_mean", tmean), ("running_var", tvariance)):
        if tangent is not None:
            raise TensorValueError(
                name,
                "is a constant to derivatives, and must have no tangent",
                hint=f"pass torch.autograd.forward_ad.unpack_dual({name}).primal",
            )


def primals(ctx: Any) -> list[Tensor | None]:
    """Return the saved tensors without their tangents at the current level."""
    # `forward_ad.unpack_dual` does not know the level of forward mode while a compiler traces.
    return [
        None if tensor is None else torch._VF._unpack_dual(tensor, level=0).primal
        for tensor in ctx.saved_tensors
    ]
