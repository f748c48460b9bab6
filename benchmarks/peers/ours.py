"""backnorm itself: the canonical operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

import backnorm
from benchmarks.model import OURS, OURS_IN_FLOAT32, Cell, Form
from benchmarks.peers.base import Data, Prepared

__all__ = ["Backnorm", "BacknormInFloat32"]


class Backnorm:
    """Ours, in both forms."""

    name = OURS
    temporaries = 1.0
    arithmetic: Literal["float32"] | None = None

    def start(self, threads: int) -> dict[str, str]:
        """Set the number of threads."""
        backnorm.set_num_threads(threads)
        return {"backnorm": backnorm.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return both forms; they can do any cell."""
        options = {**data.options, "arithmetic": self.arithmetic}
        return {
            "out": Prepared(_call(cell, data, data.out, options), _results),
            "allocate": Prepared(_call(cell, data, None, options), _results),
        }


class BacknormInFloat32(Backnorm):
    """Ours in float32 arithmetic, where that is a choice and not what it does anyway."""

    name = OURS_IN_FLOAT32
    arithmetic = "float32"

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return both forms of cells of float32, and none of others."""
        return super().prepare(cell, data) if cell.dtype == "float32" else {}


def _call(
    cell: Cell, data: Data, out: np.ndarray | None, options: dict[str, Any]
) -> Callable[[], Any]:
    x, dy, mean, variance, gamma, beta = (
        data.x,
        data.dy,
        data.mean,
        data.variance,
        data.gamma,
        data.beta,
    )
    if cell.op == "backward":
        return lambda: backnorm.batch_norm_backward(
            x, dy, mean, variance, gamma, out=out, **options
        )
    if cell.op == "forward":
        return lambda: backnorm.batch_norm_forward(x, gamma, beta, out=out, **options)
    return lambda: backnorm.batch_norm_inference(x, mean, variance, gamma, beta, out=out, **options)


def _results(returned: Any) -> Mapping[str, np.ndarray]:
    return {"y": returned} if isinstance(returned, np.ndarray) else returned._asdict()
