"""A result as a real run would give it, made up: all statuses, both forms, winning and losing."""

from __future__ import annotations

import math
import re
import zlib

import numpy as np

from benchmarks.model import (
    Cell,
    Environment,
    Outcome,
    Result,
    Row,
    Timing,
)

NETWORK = [
    (50, 64, 112, 112),
    (50, 256, 56, 56),
    (50, 128, 28, 28),
    (50, 1024, 14, 14),
    (50, 512, 7, 7),
    (50, 2048, 7, 7),
]
SMALL = [(1, 4, 2, 2), (8, 16, 8, 8), (32, 10)]
SWEEP = [(2**n, 64, 4, 4) for n in range(16)]

# Time over the floor's at large sizes, and seconds of a call.
_SPEEDS = {
    ("backnorm", "out"): (0.95, 25e-6),
    ("backnorm", "allocate"): (1.35, 26e-6),
    ("torch", "allocate"): (3.4, 9e-6),
    ("tensorflow", "allocate"): (5.0, 180e-6),
    ("jax", "allocate"): (4.2, 60e-6),
    ("onednn", "out"): (1.9, 14e-6),
    ("numpy", "allocate"): (14.0, 80e-6),
    ("floor", "out"): (1.0, 2e-6),
    ("backnorm-float32", "out"): (0.8, 20e-6),
    ("backnorm-float32", "allocate"): (1.1, 20e-6),
}
_PASSES = {"backward": 5, "forward": 3, "inference": 2}


def environment(**changes):
    fields = {
        "cpu": "AMD EPYC 9R14 (made up)",
        "system": "Linux 6.1.0 x86_64",
        "python": "3.11.9",
        "processors": 2,
        "threads": 2,
        "cache_per_core": 2**20,
        "cache_shared": 32 * 2**20,
        "versions": {"backnorm": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0", "jax": "0.10.2"},
        "date": "2026-11-21T17:00:00+00:00",
    }
    return Environment(**(fields | changes))


def timing(median, spread=0.04, samples=15):
    return Timing(median, median / (1 + spread), median * (1 + spread), samples)


def row(cell, wobble=0.25, seed=0):
    rng = np.random.default_rng([zlib.crc32(str(cell).encode()), seed])
    floor = cell.traffic / (40e9 if cell.nbytes > 2**25 else 75e9)
    outcomes = []
    for (contestant, form), (factor, call) in _SPEEDS.items():
        seconds = (floor * factor + call) * math.exp(rng.normal(0, wobble))
        if contestant == "backnorm-float32" and cell.dtype != "float32":
            continue
        if contestant == "tensorflow":
            outcomes.append(Outcome(contestant, form, "missing", None, "no module 'tensorflow'"))
        elif contestant == "onednn" and cell.dtype == "float64":
            outcomes.append(Outcome(contestant, form, "unsupported", None, "float64 | not a type"))
        elif contestant == "torch" and cell.shape == (8, 16, 8, 8):
            outcomes.append(Outcome(contestant, form, "crashed", None, "signal SIGSEGV"))
        elif contestant == "jax" and cell.op == "forward":
            detail = "variance: 93 ulp"
            outcomes.append(Outcome(contestant, form, "inaccurate", timing(seconds), detail))
        else:
            outcomes.append(Outcome(contestant, form, "ok", timing(seconds)))
    return Row(cell, tuple(outcomes))


def cells():
    chosen = [("resnet50", shape) for shape in NETWORK] + [("small", shape) for shape in SMALL]
    for dtype in ("float32", "float64"):
        for op in _PASSES:
            for suite, shape in chosen:
                for layout in ("NCX", "NXC"):
                    if len(shape) > 2 or layout == "NCX":
                        yield Cell(suite, op, shape, layout, dtype)
    for shape in SWEEP:
        for layout in ("NCX", "NXC"):
            yield Cell("sweep", "backward", shape, layout, "float32")
    # In two suites: counted once.
    yield Cell("overlap", "backward", NETWORK[0], "NCX", "float32")


def result(**changes):
    settings = {"rounds": 4, "warm": 0.02, "note": "<made up> & not measured"}
    return Result(environment(**changes), settings, tuple(row(cell) for cell in cells()))


def squeezed(text):
    """Return text without the spaces that make columns of a table equally wide."""
    return re.sub(" {2,}", " ", text)
