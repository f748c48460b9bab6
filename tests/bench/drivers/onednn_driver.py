"""Run oneDNN as a contestant on small cells; print, as JSON, how far off each result is.

Errors are multiples of what float32 arithmetic may lose: (elements of a channel + 16) roundoffs of
the magnitudes of the terms, beside one rounding to the type of the output.
"""

from __future__ import annotations

import itertools
import json

import ml_dtypes
import numpy as np

from backnorm import reference
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import ulp_error
from benchmarks.model import Cell
from benchmarks.peers.base import Data, Unsupported
from benchmarks.peers.onednn import OneDnn

# All ranks; channels that fill vectors and channels that do not; one element of space, and of all.
SHAPES = ((33, 16), (9, 5, 7), (4, 16, 7, 9), (3, 5, 1, 1), (2, 17, 3, 5, 4), (2, 16, 2, 3, 2, 2))
TYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)
OPERATIONS = ("backward", "forward", "inference")


def data_of(cell):
    dtype = np.dtype(cell.dtype)
    shape = cell.shape if cell.layout == "NCX" else (cell.shape[0], *cell.shape[2:], cell.shape[1])
    made = realistic_data(
        shape, dtype, data_format=cell.layout, rng=np.random.default_rng(5), epsilon=2.0**-10
    )
    fields = {name: getattr(made, name) for name in type(made).__dataclass_fields__}
    for array in fields.values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return Data(**fields, out=np.full(shape, np.nan, dtype))


def exact(cell, data):
    if cell.op == "backward":
        return reference.backward(*data.backward_inputs, **data.options)
    if cell.op == "forward":
        return reference.forward(data.x, data.gamma, data.beta, **data.options)
    return reference.inference(
        data.x, data.mean, data.variance, data.gamma, data.beta, **data.options
    )


def errors(cell, data, results):
    truth = exact(cell, data)
    loss = (data.x.size // data.mean.size + 16) * 3 * 2.0**-24
    found = {}
    for name, array in results.items():
        value, terms = getattr(truth, name), getattr(truth, f"{name}_terms")
        assert array.shape == value.hi.shape
        error = np.abs((array.astype(float) - value.hi) - value.lo)
        ulps = ulp_error(array, value, array.dtype)
        found[name] = float(np.max(np.where(ulps <= 1, 0.0, error / (loss * terms))))
    return found


def main():
    contestant = OneDnn()
    report = {"versions": contestant.start(threads=2), "cells": {}}
    for op, shape, layout, dtype in itertools.product(OPERATIONS, SHAPES, ("NCX", "NXC"), TYPES):
        cell = Cell("test", op, shape, layout, np.dtype(dtype).name)
        data = data_of(cell)
        try:
            (prepared,) = contestant.prepare(cell, data).values()
        except Unsupported as error:
            report["cells"][str(cell)] = str(error)
            continue
        for _ in range(2):
            data.out.fill(np.nan)
            found = errors(cell, data, prepared.results(prepared.call()))
        report["cells"][str(cell)] = found
    print(json.dumps(report))


main()
