"""NumPy: the formula as one writes it. Elements of 16 bits are widened to float32 first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.model import Cell, Form
from benchmarks.peers.base import Data, Prepared

__all__ = ["Textbook"]


class Textbook:
    """Allocating: each operation makes its array."""

    name = "numpy"
    temporaries = 5.0

    def start(self, threads: int) -> dict[str, str]:
        """Do nothing: NumPy's element-wise operations use one thread."""
        return {"numpy": np.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form."""
        axis = 1 if cell.layout == "NCX" else len(cell.shape) - 1
        axes = tuple(i for i in range(len(cell.shape)) if i != axis)
        column = tuple(-1 if i == axis else 1 for i in range(len(cell.shape)))
        function = {"backward": _backward, "forward": _forward, "inference": _inference}[cell.op]
        return {"allocate": Prepared(lambda: function(data, axes, column), _results)}


def _backward(data: Data, axes: tuple[int, ...], column: tuple[int, ...]) -> dict[str, np.ndarray]:
    gradient = _wide(data.dy)
    centred = _wide(data.x) - data.mean.reshape(column)
    count = data.x.size // data.mean.size
    s = 1 / np.sqrt(data.variance + data.variance.dtype.type(data.epsilon))
    sum_dy = gradient.sum(axes)
    sum_dy_xmu = (gradient * centred).sum(axes)
    slope = s * s * sum_dy_xmu / count
    dx = (data.gamma * s).reshape(column) * (
        gradient - (sum_dy / count).reshape(column) - centred * slope.reshape(column)
    )
    return {"dx": _narrow(dx, data), "dgamma": s * sum_dy_xmu, "dbeta": sum_dy}


def _forward(data: Data, axes: tuple[int, ...], column: tuple[int, ...]) -> dict[str, np.ndarray]:
    x = _wide(data.x)
    mean, variance = x.mean(axes), x.var(axes)
    y = _normalized(x, mean, variance, data, column)
    return {"y": _narrow(y, data), "mean": mean, "variance": variance}


def _inference(data: Data, axes: tuple[int, ...], column: tuple[int, ...]) -> dict[str, np.ndarray]:
    y = _normalized(_wide(data.x), data.mean, data.variance, data, column)
    return {"y": _narrow(y, data)}


def _normalized(
    x: np.ndarray, mean: np.ndarray, variance: np.ndarray, data: Data, column: tuple[int, ...]
) -> Any:
    gain = data.gamma / np.sqrt(variance + variance.dtype.type(data.epsilon))
    return gain.reshape(column) * (x - mean.reshape(column)) + data.beta.reshape(column)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array


def _narrow(array: np.ndarray, data: Data) -> np.ndarray:
    return array.astype(data.x.dtype, copy=False)


def _results(returned: Any) -> Mapping[str, np.ndarray]:
    return returned  # type: ignore[no-any-return]
