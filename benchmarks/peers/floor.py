"""The floor: the memory that a cell's operation moves, and nothing else."""

from __future__ import annotations

from functools import partial

import numpy as np

import backnorm
from backnorm.cpu.floor import move
from benchmarks.cells import FLOOR, Cell, Form
from benchmarks.peers.base import Contestant, Data, Prepared, Unsupported

__all__ = ["Floor"]

# A float64, as which the floor sees all memory.
_UNIT = 8


class Floor(Contestant):
    """Two plain loops over the memory, with the threads and stores that ours would use."""

    name = FLOOR
    temporaries = 0.0

    def start(self, threads: int) -> dict[str, str]:
        """Set the number of threads: that of ours."""
        backnorm.set_num_threads(threads)
        return {}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the form "out"; there is no result to look at."""
        if cell.nbytes < _UNIT:
            raise Unsupported("less memory than the floor moves at a time")
        plan = backnorm.explain(*data.backward_inputs, **data.options)
        x, dy, out = map(_flat, (data.x, data.dy, data.out))
        source = dy if cell.op == "backward" else None
        call = partial(
            move,
            x,
            source,
            out,
            reads_first=cell.op != "inference",
            streaming=plan.streaming,
            threads=plan.threads,
        )
        return {"out": Prepared(call, lambda _: {})}


def _flat(array: np.ndarray) -> np.ndarray:
    memory = array.reshape(-1).view(np.uint8)
    return memory[: memory.size // _UNIT * _UNIT].view(np.float64)
