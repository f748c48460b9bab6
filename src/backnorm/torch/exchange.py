"""What the processes of a group tell each other: 2C + 1 float64 numbers each way.

*Forward*: mean and variance of each process's own elements, and their number. They are combined by
the formula for parallel variances (Chan, Golub and LeVeque, 1979), which loses no digits whatever
the means; sums of squares would lose all of them. In a small group everybody gets the numbers of
everybody, in one message, and combines them in the order of ranks: 8 * (2C + 1) bytes of every
process. In a large one that would take long, as bytes and, by rings, waiting grow with the group;
so two sums are made one after the other: of the means, weighted, and then of the variances and what
the means are apart. To every process come twice 8 * (2C + 1) bytes, whatever the size of the group.

*Backward*: one sum of 2C numbers; how many elements there are is known from the forward pass.

*Reproducible sums* are integers, with the bins that they count in (`binned`): 8C + 1 numbers each
way, or 10C + 1 of float64 elements. In a small group they are gathered as well; in a large one the
top bins are agreed on first, by a maximum of 2C numbers, and then all the others are one sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm import binned
from backnorm.binned import raised, tops_of, with_tops
from backnorm.errors import BacknormError

__all__ = [
    "SynchronisationError",
    "bins_of_all",
    "check_count",
    "group_of",
    "is_first",
    "moments_of_all",
    "sums_of_all",
]

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


def check_count(count: int, group: Any) -> None:
    """Raise if a part has more elements in a channel than reproducible sums of all parts hold.

    Each process checks its own part, before any exchange, as if all parts were as large.
    """
    binned.check_count("input", dist.get_world_size(group) * count)


def is_first(group: Any) -> bool:
    """Return whether this is the first process of a group; None is this one alone."""
    return group is None or dist.get_rank(group) == 0


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


def bins_of_all(own: Tensor, channels: int, group: Any, layer: str) -> Tensor:
    """Return the reproducible sums of all processes.

    Parameters
    ----------
    own : int64 Tensor, shape (rows * channels + 1,)
        Those of this process, and its number of elements.
    channels : int
    group, layer
        As of `moments_of_all`.
    """
    size, rows = dist.get_world_size(group), own.shape[0] // channels if channels else 0
    if not rows:
        return own
    if size <= _GATHERED:
        every = own.new_empty(size * own.shape[0])
        _exchange(_all_gather, every, own, group=group, layer=layer)
        every = every.view(size, -1)
        count = every[:, -1].sum()
        bins = every[:, :-1].reshape(size, rows, channels).transpose(0, 1)
        tops = tops_of(bins).amax(1, keepdim=True)
        total = raised(bins, tops, torch).sum(1)
        tops = tops[:, 0]
    else:
        bins = own[:-1].view(rows, channels)
        tops = tops_of(bins).clone()
        _exchange(dist.all_reduce, tops, op=dist.ReduceOp.MAX, group=group, layer=layer)
        sums = torch.cat((raised(bins, tops, torch).flatten(), own[-1:]))
        _exchange(dist.all_reduce, sums, group=group, layer=layer)
        total, count = sums[:-1].view(rows, channels), sums[-1]
    return torch.cat((with_tops(total, tops, torch).flatten(), count.view(1)))


def _exchange(
    collective: Callable[..., Any], *tensors: Tensor, group: Any, layer: str, **how: Any
) -> None:
    if torch.compiler.is_compiling():
        # The compiler knows the collective by itself, and puts a functional one in its place.
        collective(*tensors, group=group, **how)
        return
    try:
        collective(*tensors, group=group, **how)
    except RuntimeError as error:
        raise SynchronisationError(
            f"{layer}: this process (rank {dist.get_rank(group)} of {dist.get_world_size(group)}) "
            f"could not exchange its statistics with the others; one of them may have ended, "
            f"raised, or left out this layer: {error}"
        ) from error
