"""Mean and variance beside a tensor: their type, and the running ones that follow them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backnorm.errors import ArgumentValueError

__all__ = ["Running", "follows", "statistics_type", "update_running"]


class Running(NamedTuple):
    """Running statistics, and the share of a batch that they move by."""

    mean: Tensor
    variance: Tensor
    momentum: float


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the mean and variance of an x of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def follows(running: Running, x: Tensor) -> bool:
    """Whether a kernel can move running statistics, or raise if they do not fit x."""
    dtype = statistics_type(x.dtype)
    for tensor in (running.mean, running.variance):
        # Nobody else checks them in training.
        if tensor.shape != x.shape[1:2] or tensor.dtype not in (dtype, x.dtype):
            raise ArgumentValueError("running_mean, running_var", "do not fit input")
    return all(
        tensor.dtype is dtype and tensor.is_contiguous()
        for tensor in (running.mean, running.variance)
    )


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    count: int,
) -> None:
    """Move the running statistics towards those of a batch of `count` elements a channel.

    In float64, rounded once, as kernels do. Autograd is not told.
    """
    shares = momentum, momentum * count / (count - 1)
    moves = (running_mean, mean), (running_var, variance)
    for (running, value), share in zip(moves, shares, strict=True):
        target = running.detach()
        target.copy_(value.detach().double() * share + target.double() * (1.0 - momentum))
