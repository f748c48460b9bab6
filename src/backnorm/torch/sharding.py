"""Distributed tensors (DTensor): how a call is split over the devices of a mesh.

As PyTorch splits its own operators: statistics are those of the whole batch, so tensors that are
sharded over batch or space are gathered first; those that are sharded over channels stay so, as
every channel is a problem of its own.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

from backnorm.torch import operations

__all__ = ["is_distributed"]

_MODULE = "torch.distributed.tensor"


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is distributed. If so, PyTorch has been told how our operators are split."""
    return _registered() and isinstance(tensor, sys.modules[_MODULE].DTensor)


def _registered() -> bool:
    """Register the rules, once somebody has imported DTensor: that takes longer than all of us."""
    if _MODULE not in sys.modules:
        return False
    _register()
    return True


# A compiler calls it when it comes across it, and takes the result as a constant.
_registered._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for operator, results in (
        (operations.batch_norm, "x c c -"),
        (operations.batch_norm_inference, "x"),
        (operations.batch_norm_backward, "x c c -"),
        (operations.batch_norm_double_backward, "x x c"),
    ):
        overload = operator._opoverload
        register_sharding(overload)(functools.partial(_placements, overload, results.split()))


def _placements(
    overload: Any, results: list[str], *arguments: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Return where results and arguments of an operator may be: everywhere, or by channels.

    A result is in shape as x (``x``), per channel (``c``), or empty without a ReLU (``-``).
    """
    from torch.distributed.tensor import Replicate, Shard

    names = [each.name for each in overload._schema.arguments]
    # Tensors come as what is known of them, and absent ones as None.
    axes = [getattr(each, "ndim", None) for each in arguments]
    everywhere = [Replicate()] * len(results), [None if n is None else Replicate() for n in axes]
    # What is the default may be left out.
    given = dict(zip(names, arguments, strict=False))
    if given.get("relu") or given.get("mask") is not None:
        # A mask is of all channels: its bits are in the order of x in memory.
        return [everywhere]
    kinds = {"x": Shard(1), "c": Shard(0), "-": Replicate()}
    by_channels = [None if n is None else Shard(1 if n > 1 else 0) for n in axes]
    return [([kinds[each] for each in results], by_channels), everywhere]
