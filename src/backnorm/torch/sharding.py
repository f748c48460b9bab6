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
    """Whether a tensor is distributed. If so, PyTorch knows how our operators are split."""
    return _registered() and isinstance(tensor, sys.modules[_MODULE].DTensor)


def _registered() -> bool:
    """Register the rules if DTensor is imported; importing it takes longer than importing us."""
    if _MODULE not in sys.modules:
        return False
    _register()
    return True


# Dynamo runs it at trace time.
_registered._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for operator, results in (
        (operations.batch_norm, "x c c"),
        (operations.batch_norm_inference, "x"),
        (operations.batch_norm_backward, "x c c"),
        (operations.batch_norm_double_backward, "x x c"),
    ):
        register_sharding(operator)(functools.partial(_placements, operator, results.split()))


def _placements(
    overload: Any, results: list[str], *arguments: Any
) -> list[tuple[list[Any], list[Any]]]:
    """Return where results and arguments of an operator may be: everywhere, or by channels.

    A result has the shape of x (``x``), or is per channel (``c``).
    """
    from torch.distributed.tensor import Replicate, Shard

    # Tensors come as what is known of them, and absent ones as None.
    axes = [getattr(each, "ndim", None) for each in arguments]
    everywhere = [Replicate()] * len(results), [None if n is None else Replicate() for n in axes]
    kinds = {"x": Shard(1), "c": Shard(0)}
    by_channels = [None if n is None else Shard(1 if n > 1 else 0) for n in axes]
    return [([kinds[each] for each in results], by_channels), everywhere]
