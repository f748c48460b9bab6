"""oneDNN's batch-normalisation primitive as a contestant, through its C API."""

from __future__ import annotations

import numpy as np

from backnorm.dtypes import FLOAT32
from backnorm.peers.onednn import Library, MissingError, Primitive, StatusError
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
        try:
            self._library = Library(threads)
        except MissingError as error:
            raise Missing(str(error)) from error
        return {"oneDNN": self._library.version}

    def prepare(self, cell: Cell, data: Data) -> dict[Form, Prepared]:
        """Return the form "out"; oneDNN has no other."""
        if data.mean.dtype != FLOAT32:
            raise Unsupported(f"its statistics are float32, not {data.mean.dtype}")
        arrays, results = _arrays(cell, data)
        try:
            training = cell.op != "inference"
            primitive = Primitive(self._library, arrays, data.epsilon, training=training)
        except StatusError as error:
            raise Unsupported(str(error)) from None
        return {"out": Prepared(primitive, lambda _: results)}


def _arrays(cell: Cell, data: Data) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return a primitive's operands by oneDNN's names, and its results by our names."""
    x, dy, out = (_in_ncx(array, cell.layout) for array in (data.x, data.dy, data.out))
    if cell.op == "backward":
        dgamma, dbeta = np.empty_like(data.gamma), np.empty_like(data.beta)
        inputs = {"src": x, "diff_dst": dy, "mean": data.mean, "variance": data.variance}
        gradients = {"diff_src": out, "diff_scale": dgamma, "diff_shift": dbeta}
        results = {"dx": data.out, "dgamma": dgamma, "dbeta": dbeta}
        return {**inputs, "scale": data.gamma, **gradients}, results
    statistics = {"mean": data.mean, "variance": data.variance}
    results = {"y": data.out}
    if cell.op == "forward":
        statistics = {name: np.empty_like(array) for name, array in statistics.items()}
        results |= statistics
    return {"src": x, **statistics, "scale": data.gamma, "shift": data.beta, "dst": out}, results


def _in_ncx(array: np.ndarray, layout: str) -> np.ndarray:
    """Return a view of an array of x's shape with the axes (N, C, ...), at most `_MOST_AXES`."""
    view = array if layout == "NCX" else np.moveaxis(array, -1, 1)
    return view if view.ndim <= _MOST_AXES else view.reshape(*view.shape[:2], -1, 1)
