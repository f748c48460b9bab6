"""oneDNN's batch-normalisation primitive as a contestant, through its C API."""

from __future__ import annotations

import math

import numpy as np

from backnorm.dtypes import FLOAT32
from benchmarks.model import Cell, Form
from benchmarks.peers import onednn_library
from benchmarks.peers.base import Data, Missing, Prepared, Unsupported
from benchmarks.peers.onednn_library import (
    Argument,
    Flags,
    Handle,
    Library,
    Primitive,
    StatusError,
)

__all__ = ["OneDnn"]

# The fast implementations know 2 to 5 axes; more would be left to the library's slow reference.
_MOST_AXES = 5

_AFFINE = Flags.SCALE | Flags.SHIFT

#: What a primitive works on, and what of that is its result, by our names.
_Arrays = tuple[dict[Argument, np.ndarray], dict[str, np.ndarray]]


class OneDnn:
    """oneDNN (package onednn-cpu-gomp), on NumPy's own memory in its plain layouts.

    The primitive is made beforehand, as a framework would keep it; a call executes it and waits.
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
        """Return the one form that it has: into `data.out`."""
        if data.mean.dtype != FLOAT32:
            raise Unsupported(f"its statistics are float32, not {data.mean.dtype}")
        arrays, results = _arrays(cell, data)
        try:
            memory = _memory(self._library, cell, data.x.dtype)
            descriptor = _descriptor(self._library, cell, memory, data.epsilon)
            primitive = Primitive(self._library, descriptor, memory, arrays)
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


def _descriptor(library: Library, cell: Cell, memory: Handle, epsilon: float) -> Handle:
    if cell.op == "backward":
        return library.backward(memory, epsilon, _AFFINE)
    if cell.op == "forward":
        return library.forward(memory, epsilon, _AFFINE, training=True)
    return library.forward(memory, epsilon, _AFFINE | Flags.GLOBAL_STATISTICS, training=False)


def _arrays(cell: Cell, data: Data) -> _Arrays:
    if cell.op == "backward":
        dgamma, dbeta = np.empty_like(data.gamma), np.empty_like(data.beta)
        return {
            Argument.SRC: data.x,
            Argument.DIFF_DST: data.dy,
            Argument.MEAN: data.mean,
            Argument.VARIANCE: data.variance,
            Argument.SCALE: data.gamma,
            Argument.DIFF_SRC: data.out,
            Argument.DIFF_SCALE: dgamma,
            Argument.DIFF_SHIFT: dbeta,
        }, {"dx": data.out, "dgamma": dgamma, "dbeta": dbeta}
    computes = cell.op == "forward"
    mean = np.empty_like(data.mean) if computes else data.mean
    variance = np.empty_like(data.variance) if computes else data.variance
    return {
        Argument.SRC: data.x,
        Argument.MEAN: mean,
        Argument.VARIANCE: variance,
        Argument.SCALE: data.gamma,
        Argument.SHIFT: data.beta,
        Argument.DST: data.out,
    }, {"y": data.out} | ({"mean": mean, "variance": variance} if computes else {})
