"""What DistributedDataParallel calls to add up the gradients of its processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm.errors import ArgumentTypeError, described
from backnorm.torch.exact_sums import Part, sum_of_all
from backnorm.torch.pieces import ReproducibleGradients

__all__ = ["reproducible_hook"]


def reproducible_hook(state: Any, bucket: Any) -> Any:
    """Add up gradients so that the sum has the same bits in any order, on any ring or tree.

    For ``DistributedDataParallel.register_comm_hook(state, backnorm.torch.reproducible_hook)``; of
    models with and without batch normalisation. It asks of gloo and NCCL what both have; with NCCL
    it has not run.

    Parameters
    ----------
    state : None, ProcessGroup or ReproducibleGradients
        A group, or all processes: gradients are averaged, and do not depend on which process had
        which part of a batch. `ReproducibleGradients`: they do not depend on how many processes
        there are, either, nor on which samples each has.
    bucket : torch.distributed.GradBucket

    Returns
    -------
    torch.futures.Future
        Of the sums, divided by the number of processes but with ``average=False``.

    Raises
    ------
    ArgumentTypeError
        If `state` is something else, or gradients are not float32, float64, float16 or bfloat16, or
        are sparse.
    ArgumentValueError
        If there are more than 8192 gradients to add, pieces times processes; or what
        `ReproducibleGradients` says.

    Notes
    -----
    Each gradient is rounded, by itself, to a multiple of 2**-40 of the largest that there is for
    this element, and multiples are added exactly; the error of a sum of N is N * 2**-40 of the
    largest gradient, and a rounding to the type (float64: 2**-80; 16 bits are rounded to float32
    before). Infinities and NaN become what they become in a sum. An element takes 9 bytes on the
    wire, in two messages (float64: 20), where PyTorch's own sum takes 4. The second is sent while
    the backward pass goes on.
    """
    buffer, views = bucket.buffer(), bucket.gradients()
    if buffer.layout is not torch.strided:
        # A bucket of sparse gradients has one parameter, and no names.
        (parameter,) = bucket.parameters()
        raise ArgumentTypeError(
            "bucket",
            f"has a gradient that cannot be added reproducibly, of the parameter of shape "
            f"{tuple(parameter.shape)}",
            came=buffer.layout, accepted=str(torch.strided),
            hint="use sparse=False in its module",
        )  # fmt: skip
    pieces: list[list[Tensor]] = [[] for _ in views]
    if isinstance(state, ReproducibleGradients):
        group, average = state.process_group, state.average
        pieces = state._take(bucket.parameters(), views)
    elif state is None or isinstance(state, dist.ProcessGroup):
        group, average = state, True
    else:
        raise ArgumentTypeError(
            "state", "says nothing of processes", came=described(state),
            accepted="None, a ProcessGroup or a ReproducibleGradients",
        )  # fmt: skip
    divisor = dist.get_world_size(group) if average else 1
    return sum_of_all(buffer, _parts(buffer, bucket, pieces), group, divisor)


# The classes themselves, by which PyTorch knows a hook, and which are not everywhere.
if dist.is_available():
    reproducible_hook.__annotations__ = {
        "state": Any,
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[Tensor],
    }


def _parts(buffer: Tensor, bucket: Any, pieces: Iterable[list[Tensor]]) -> Iterator[Part]:
    """Yield gradients of pieces as the buffer has them.

    There a parameter's gradient lies as the parameter does, where that is dense, in whatever order
    of its axes. (Views that the bucket offers are contiguous, and of others.)
    """
    for view, p, gradients in zip(bucket.gradients(), bucket.parameters(), pieces, strict=True):
        dense = torch.ops.aten.is_non_overlapping_and_dense(p)
        stride = p.stride() if dense else view.stride()
        first = view.storage_offset() - buffer.storage_offset()
        for each in gradients:
            if each.stride() != stride:
                each = each.new_empty_strided(each.shape, stride).copy_(each)
            yield Part(first, each.as_strided((each.numel(),), (1,)))
