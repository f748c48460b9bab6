"""NumPy: the plain formula."""

from __future__ import annotations

import numpy as np

from benchmarks.cells import Cell, Form
from benchmarks.peers.base import Contestant, Data, Prepared
from benchmarks.peers.formula import INPUTS, OUTPUTS, Library, formula

__all__ = ["Textbook"]


_NUMPY = Library(lambda x: 1 / np.sqrt(x), lambda x, dtype: x.astype(dtype, copy=False), np.float32)


class Textbook(Contestant):
    """NumPy, only allocating: each operation makes a new array, with one thread."""

    name = "numpy"
    temporaries = 5.0

    def start(self, threads: int) -> dict[str, str]:
        """Return the version."""
        return {"numpy": np.__version__}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the allocating form."""
        axis = 1 if cell.layout == "NCX" else len(cell.shape) - 1
        function = formula(_NUMPY, cell, axis, data.epsilon)
        operands = [getattr(data, name) for name in INPUTS[cell.op]]
        return {
            "allocate": Prepared(
                lambda: function(*operands),
                lambda returned: dict(zip(OUTPUTS[cell.op], returned, strict=True)),
            )
        }
