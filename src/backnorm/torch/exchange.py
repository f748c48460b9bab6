"""What the processes of a group tell each other: 2C + 1 float64 numbers each way.

*Forward*: mean and variance of each process's own elements, and their number. They are combined by
the formula for parallel variances (Chan, Golub and LeVeque, 1979), which loses no digits whatever
the means; sums of squares would lose all of them. In a small group everybody gets the numbers of
everybody, in one message, and combines them in the order of ranks: 8 * (2C + 1) bytes of every
process. In a large one that would take long, as bytes and, by rings, waiting grow with the group;
so two sums are made one after the other: of the means, weighted, and then of the variances and what
the means are apart. To every process come twice 8 * (2C + 1) bytes, whatever the size of the group.

*Backward*: one sum of 2C numbers; how many elements there are is known from the forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm.errors import BacknormError

__all__ = ["SynchronisationError", "group_of", "moments_of_all", "sums_of_all"]

# Processes up to which everybody gets everybody's numbers. By a ring that takes a hop less than
# there are processes; two sums, each up and down a tree, take four times the logarithm to base two:
# 15 and 16 hops of 16 processes. The bytes are half a megabyte then, of 2048 channels.
_GATHERED = 16

# Its name until PyTorch 2.12. Neither is there where PyTorch was built without processes.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)


class SynchronisationError(BacknormError, RuntimeError):
    """The processes of a group could not exchange the statistics of a layer."""


def group_of(group: Any) -> Any:
    """Return the process group to exchange with, or None if this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = dist.group.WORLD if group is None else group
    return group if dist.get_world_size(group) > 1 else None


def moments_of_all(own: Tensor, group: Any, layer: str) -> Tensor:
    """Return the moments of the elements of all processes.

    Parameters
    ----------
    own : Tensor, shape (2C + 1,)
        Means, biased variances and number of elements, of this process's elements.
    group : ProcessGroup
    layer : str
        What to call the layer in an error.
    """
    size, channels = dist.get_world_size(group), own.shape[0] // 2
    if size <= _GATHERED:
        every = own.new_empty(size * own.shape[0])
        _exchange(_all_gather, every, own, group=group, layer=layer)
        every = every.view(size, -1)
        counts = every[:, -1:]
        total = counts.sum()
        shares = counts / total.clamp(min=1.0)
        means, variances = every[:, :channels], every[:, channels:-1]
        mean = (shares * means).sum(0)
        apart = means - mean
        variance = (shares * (variances + apart * apart)).sum(0)
        return torch.cat((mean, variance, total.view(1)))
    mean, variance, count = own[:channels], own[channels:-1], own[-1:]
    sums = torch.cat((mean * count, count))
    _exchange(dist.all_reduce, sums, group=group, layer=layer)
    total = sums[-1:]
    elements = total.clamp(min=1.0)
    mean_of_all = sums[:-1] / elements
    apart = mean - mean_of_all
    squares = count * (variance + apart * apart)
    _exchange(dist.all_reduce, squares, group=group, layer=layer)
    return torch.cat((mean_of_all, squares / elements, total))


def sums_of_all(own: Tensor, group: Any, layer: str) -> Tensor:
    """Return the sums of all processes.

    Parameters
    ----------
    own : Tensor, shape (2C,)
    group, layer
        As of `moments_of_all`.
    """
    total = own.clone()
    _exchange(dist.all_reduce, total, group=group, layer=layer)
    return total


def _exchange(collective: Callable[..., Any], *tensors: Tensor, group: Any, layer: str) -> None:
    if torch.compiler.is_compiling():
        # The compiler knows the collective by itself, and puts a functional one in its place.
        collective(*tensors, group=group)
        return
    try:
        collective(*tensors, group=group)
    except RuntimeError as error:
        raise SynchronisationError(
            f"{layer}: this process (rank {dist.get_rank(group)} of {dist.get_world_size(group)}) "
            f"could not exchange its statistics with the others; one of them may have ended, "
            f"raised, or left out this layer: {error}"
        ) from error
