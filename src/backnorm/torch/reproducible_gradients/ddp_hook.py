"""A communication hook for DistributedDataParallel that adds up gradients reproducibly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from backnorm.errors import ArgumentTypeError, described
from backnorm.torch.reproducible_gradients.exact_sums import Part, sum_of_all
from backnorm.torch.reproducible_gradients.micro_batches import ReproducibleGradients


def reproducible_hook(
    state: dist.ProcessGroup | ReproducibleGradients | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Add up gradients so that the sum has the same bits for any order of processes.

    Register the hook by ``DistributedDataParallel.register_comm_hook(state, reproducible_hook)``.
    It works for models with and without batch normalisation. It uses only operations that both gloo
    and NCCL support, but has not been tested with NCCL.

    Parameters
    ----------
    state : None, ProcessGroup or ReproducibleGradients
        With a group, or None for all processes, gradients are averaged and do not depend on which
        process had which part of a batch. With `ReproducibleGradients`, gradients also do not
        depend on the number of processes, or on how samples are divided.
    bucket : torch.distributed.GradBucket

    Returns
    -------
    torch.futures.Future
        Its value is the sums, divided by the number of processes unless ``average=False``.

    Raises
    ------
    ArgumentTypeError
        If `state` has another type, or gradients are sparse, or are not float32, float64, float16
        or bfloat16.
    ArgumentValueError
        If there are more than 8192 gradients to add (micro-batches times processes), or a gradient
        was not computed in the micro-batches of `ReproducibleGradients`.

    Notes
    -----
    The gradients of an element are rounded to multiples of 2**-40 times the power of two above the
    largest of them; these multiples are added exactly. The error of a sum of N gradients is at most
    N * 2**-40 of the largest gradient (float64: N * 2**-80), plus the rounding to the type (16-bit
    sums are rounded to float32 first). Infinities and NaN have the same effect as in a plain sum. A
    float32 element takes 9 bytes in two messages, and 4 in PyTorch's own sum (float64: 20 and 8).
    The second message is sent while the backward pass continues.
    """
    buffer, views = bucket.buffer(), bucket.gradients()
    if buffer.layout is not torch.strided:
        # A bucket of sparse gradients has one parameter. DistributedDataParallel does not pass the
        # parameter's name, so the error message has the parameter's shape.
        (parameter,) = bucket.parameters()
        raise ArgumentTypeError(
            "bucket",
            f"must have dense gradients; those of shape {tuple(parameter.shape)} are not dense",
            came=buffer.layout, accepted=torch.strided, hint="use sparse=False in its module",
        )  # fmt: skip
    gradients: Sequence[Sequence[Tensor]] = [()] * len(views)
    if isinstance(state, ReproducibleGradients):
        group, average = state.process_group, state.average
        gradients = state._pop(bucket.parameters(), views)
    elif state is None or isinstance(state, dist.ProcessGroup):
        group, average = state, True
    else:
        raise ArgumentTypeError(
            "state", "must be None, a ProcessGroup or ReproducibleGradients", came=described(state)
        )
    divisor = dist.get_world_size(group) if average else 1
    return sum_of_all(buffer, _parts(buffer, bucket, gradients), group, divisor)


# DistributedDataParallel compares a hook's annotations with classes. It would reject the
# annotations in this module, which are strings (postponed annotations). So the hook's annotations
# are removed.
reproducible_hook.__annotations__.clear()


def _parts(
    buffer: Tensor, bucket: dist.GradBucket, gradients: Iterable[Sequence[Tensor]]
) -> Iterator[Part]:
    """Yield the gradients of micro-batches, with their elements in the order of the buffer.

    If a parameter is dense, its elements are in the buffer in the order in which the parameter has
    them in memory. The views that `bucket.gradients()` returns are always contiguous. So if a
    parameter is dense but not contiguous, its view has the elements in another order than the
    buffer.
    """
    for view, p, each_batch in zip(bucket.gradients(), bucket.parameters(), gradients, strict=True):
        dense = torch.ops.aten.is_non_overlapping_and_dense(p)
        stride = p.stride() if dense else view.stride()
        first = view.storage_offset() - buffer.storage_offset()
        for gradient in each_batch:
            if gradient.stride() != stride:
                gradient = gradient.new_empty_strided(p.shape, stride).copy_(gradient)
            yield Part(first, gradient.as_strided((p.numel(),), (1,)))
