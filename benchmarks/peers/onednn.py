"""oneDNN's batch-normalisation primitive as a contestant, through its C API."""

from __future__ import annotations

import math

import numpy as np

from backnorm.conformance.verify import _onednn as onednn_library
from backnorm.conformance.verify._onednn import Handle, Library, Primitive, StatusError
from backnorm.dtypes import FLOAT32
from benchmarks.cells import Cell, Form
from benchmarks.peers.base import Contestant, Data, Missing, Prepared, Unsupported

__all__ = ["OneDnn"]

# The fast implementations take 2 to 5 axes; with more, the library uses a slow reference.
_MOST_AXES = 5


class OneDnn(Contestant):
    """oneDNN (package onednn-cpu-gomp), on NumPy's memory in plain layouts.

    The primitive is made beforehand, because a framework would cache it. A call executes the
    primitive and waits.
    """

    name = "onednn"
    temporaries = 0.0

    def start(self, threads: int) -> dict[str, str]:
        """Load the library, and return its own version."""
        path = onednn_library.find()
        if path is None:
            raise Missing(f"{onednn_library.DISTRIBUTION} is not installed")
        self._library = Library(path, threads)
        return {"oneDNN": self._library.version}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the form "out"; oneDNN has no other."""
        if data.mean.dtype != FLOAT32:
            raise Unsupported(f"its statistics are float32, not {data.mean.dtype}")
        library = self._library
        arrays, results = _arrays(cell, data)
        try:
            memory = _memory(library, cell, data.x.dtype)
            if cell.op == "backward":
                descriptor = library.backward(memory, data.epsilon)
            else:
                descriptor = library.forward(memory, data.epsilon, training=cell.op == "forward")
            primitive = Primitive(library, descriptor, memory, arrays)
        except StatusError as error:
            raise Unsupported(str(error)) from None
        return {"out": Prepared(primitive, lambda _: results)}


def _memory(library: Library, cell: Cell, dtype: np.dtype) -> Handle:
    """Return the descriptor of x, dy and the output."""
    dims = cell.shape
    if len(dims) > _MOST_AXES:
        dims = (*dims[:2], math.prod(dims[2:]), 1)
    axes = tuple(range(len(dims)))
    return library.memory(dims, dtype, axes if cell.layout == "NCX" else (0, *axes[2:], 1))


def _arrays(cell: Cell, data: Data) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a primitive's operands by oneDNN's names, and its results by our names."""
    if cell.op == "backward":
        dgamma, dbeta = np.empty_like(data.gamma), np.empty_like(data.beta)
        inputs = {"src": data.x, "diff_dst": data.dy, "mean": data.mean, "variance": data.variance}
        gradients = {"diff_src": data.out, "diff_scale": dgamma, "diff_shift": dbeta}
        results = {"dx": data.out, "dgamma": dgamma, "dbeta": dbeta}
        return {**inputs, "scale": data.gamma, **gradients}, results
    statistics = {"mean": data.mean, "variance": data.variance}
    results = {"y": data.out}
    if cell.op == "forward":
        statistics = {name: np.empty_like(array) for name, array in statistics.items()}
        results |= statistics
    arrays = {"src": data.x, **statistics, "scale": data.gamma, "shift": data.beta}
    return {**arrays, "dst": data.out}, results
