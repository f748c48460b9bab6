"""The plain formulas, for NumPy, JAX and PyTorch's compiler.

Elements of 16 bits are widened to float32 first, as the layers of JAX's libraries do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.cells import Cell, Operation

__all__ = ["INPUTS", "OUTPUTS", "Library", "formula"]

#: Operands and results of each operation, in the order of its formula.
INPUTS: dict[Operation, tuple[str, ...]] = {
    "backward": ("x", "dy", "mean", "variance", "gamma"),
    "forward": ("x", "gamma", "beta"),
    "inference": ("x", "mean", "variance", "gamma", "beta"),
}
OUTPUTS: dict[Operation, tuple[str, ...]] = {
    "backward": ("dx", "dgamma", "dbeta"),
    "forward": ("y", "mean", "variance"),
    "inference": ("y",),
}


class Library(NamedTuple):
    """The parts that differ between libraries: 1/sqrt, the conversion to a type, and float32."""

    rsqrt: Callable[[Any], Any]
    cast: Callable[[Any, Any], Any]
    float32: Any


def formula(
    library: Library, cell: Cell, axis: int, epsilon: float
) -> Callable[..., tuple[Any, ...]]:
    """Return a cell's operation as a function of a library's arrays, with channels along `axis`."""
    rsqrt, cast, float32 = library
    rank = len(cell.shape)
    axes = tuple(i for i in range(rank) if i != axis)
    column = tuple(-1 if i == axis else 1 for i in range(rank))

    def wide(x: Any) -> Any:
        return cast(x, float32) if x.dtype.itemsize == 2 else x

    def backward(x: Any, dy: Any, mean: Any, variance: Any, gamma: Any) -> tuple[Any, ...]:
        centred, gradient = wide(x) - mean.reshape(column), wide(dy)
        count = math.prod(x.shape) // x.shape[axis]
        s = rsqrt(variance + epsilon)
        sum_dy = gradient.sum(axes)
        sum_dy_xmu = (gradient * centred).sum(axes)
        slope = s * s * sum_dy_xmu / count
        dx = (gamma * s).reshape(column) * (
            gradient - (sum_dy / count).reshape(column) - centred * slope.reshape(column)
        )
        return cast(dx, x.dtype), s * sum_dy_xmu, sum_dy

    def inference(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> tuple[Any, ...]:
        gain = gamma * rsqrt(variance + epsilon)
        y = gain.reshape(column) * (wide(x) - mean.reshape(column)) + beta.reshape(column)
        return (cast(y, x.dtype),)

    def forward(x: Any, gamma: Any, beta: Any) -> tuple[Any, ...]:
        mean = wide(x).mean(axes)
        centred = wide(x) - mean.reshape(column)
        variance = (centred * centred).mean(axes)
        return (*inference(x, mean, variance, gamma, beta), mean, variance)

    if cell.op == "backward":
        return backward
    return forward if cell.op == "forward" else inference
