"""Distributed tensors (DTensor): how a call is split over the devices of a mesh.

As PyTorch splits its own operators: statistics are those of the whole batch, so tensors that are
sharded over batch or space are gathered first. Tensors that are sharded over channels stay so,
because every channel is a problem of its own.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from backnorm.torch import operations

__all__ = ["register"]


def register() -> bool:
    """Register the rules of our operators if DTensor is imported.

    Importing DTensor takes longer than importing backnorm.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False
    _register()
    return True


# Dynamo calls it while it traces.
register._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for operator, results in (
        (operations.batch_norm, "x c c"),
        (operations.batch_norm_inference, "x"),
        (operations.batch_norm_backward, "x c c"),
        (operations.batch_norm_double_backward, "x x c"),
    ):
        register_sharding(operator)(functools.partial(_placements, results.split()))


def _placements(results: list[str], *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return where results and arguments of an operator may be: replicated, or by channels.

    A result has the shape of x (``x``), or is per channel (``c``).
    """
    from torch.distributed.tensor import Replicate, Shard

    # An argument is the specification of a tensor, or None for an absent one.
    ranks = [getattr(argument, "ndim", None) for argument in arguments]
    replicated = [Replicate()] * len(results), [None if n is None else Replicate() for n in ranks]
    kinds = {"x": Shard(1), "c": Shard(0)}
    by_channels = [None if n is None else Shard(1 if n > 1 else 0) for n in ranks]
    return [([kinds[kind] for kind in results], by_channels), replicated]
