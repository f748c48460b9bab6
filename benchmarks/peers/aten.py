"""PyTorch's own operators without autograd, ``native_batch_norm`` and its gradient, on any device.

The torch module is an argument, so this file imports no framework.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cells import Cell, Operation
from benchmarks.peers.tensors import LayerTensors

__all__ = ["NAMES", "inverse_deviation", "native_call"]

#: The compared results of the operators, in order. The third result of a forward pass, the inverse
#: deviation, is not compared.
NAMES: dict[Operation, tuple[str, ...]] = {
    "backward": ("dx", "dgamma", "dbeta"),
    "forward": ("y", "mean"),
    "inference": ("y",),
}


def native_call(
    torch: Any, cell: Cell, tensors: LayerTensors, epsilon: float
) -> tuple[Any, tuple[Any, ...]]:
    """Return the operator of a cell, with all its overloads, and its arguments."""
    t = tensors
    if cell.op == "backward":
        saved = inverse_deviation(torch, t.variance, epsilon)
        arguments = (t.dy, t.x, t.gamma, None, None, t.mean, saved, True, epsilon, [True] * 3)
        return torch.ops.aten.native_batch_norm_backward, arguments
    running = (t.mean, t.variance) if cell.op == "inference" else (None, None)
    arguments = (t.x, t.gamma, t.beta, *running, cell.op == "forward", 0.0, epsilon)
    return torch.ops.aten.native_batch_norm, arguments


def inverse_deviation(torch: Any, variance: Any, epsilon: float) -> Any:
    """Return 1/sqrt(variance + epsilon), which PyTorch saves instead of the variance."""
    return (1.0 / torch.sqrt(variance.double() + epsilon)).to(variance.dtype)
