"""backnorm itself: the canonical operator."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

import backnorm
from benchmarks.cells import OURS, OURS_IN_FLOAT32, OURS_REPRODUCIBLE, Cell, Form, Operation
from benchmarks.peers.base import Contestant, Data, Prepared
from benchmarks.peers.formula import INPUTS

__all__ = ["Backnorm", "BacknormInFloat32", "BacknormReproducible"]

_FUNCTIONS: dict[Operation, Any] = {
    "backward": backnorm.batch_norm_backward,
    "forward": backnorm.batch_norm_forward,
    "inference": backnorm.batch_norm_inference,
}


class Backnorm(Contestant):
    """Ours, in both forms."""

    name = OURS
    options: ClassVar[Mapping[str, Any]] = {}

    def start(self, threads: int) -> dict[str, str]:
        """Set the number of threads."""
        backnorm.set_num_threads(threads)
        return {"backnorm": backnorm.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return both forms; each can compute any cell."""
        operands = [getattr(data, name) for name in INPUTS[cell.op]]
        call = partial(_FUNCTIONS[cell.op], *operands, **data.options, **self.options)
        return {
            "out": Prepared(partial(call, out=data.out), _results),
            "allocate": Prepared(call, _results),
        }


class BacknormInFloat32(Backnorm):
    """Ours in float32 arithmetic, which is an option only for float32 elements."""

    name = OURS_IN_FLOAT32
    options: ClassVar = {"arithmetic": "float32"}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return both forms of a float32 cell, and none of other cells."""
        return super().prepare(cell, data) if cell.dtype == "float32" else {}


class BacknormReproducible(Backnorm):
    """Ours with reproducible sums, which inference does not have."""

    name = OURS_REPRODUCIBLE
    options: ClassVar = {"reproducible": True}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return both forms of a cell with sums, and none of inference."""
        return super().prepare(cell, data) if cell.op != "inference" else {}


def _results(returned: Any) -> Mapping[str, np.ndarray]:
    return {"y": returned} if isinstance(returned, np.ndarray) else returned._asdict()
