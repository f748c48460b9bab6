"""The type of a batch's mean and variance, and the running statistics that they update."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

__all__ = ["Running", "statistics_type", "update_running"]


#: Running statistics, mean and variance, and the weight of a batch in their update.
Running: TypeAlias = tuple[Tensor, Tensor, float]


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the mean and variance of an x of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def update_running(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    count: int,
) -> None:
    """Update running statistics from those of a batch of `count` elements a channel.

    In float64, rounded once, as kernels do. Autograd does not record the update, and the version
    counter does not change, as in PyTorch: weights may be views of the same base.
    """
    shares = momentum, momentum * count / (count - 1)
    moves = (running_mean, mean), (running_var, variance)
    for (running, value), share in zip(moves, shares, strict=True):
        target = running.data
        target.copy_(value.detach().double() * share + target.double() * (1.0 - momentum))
