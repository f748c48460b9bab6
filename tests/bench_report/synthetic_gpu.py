"""A result as a run on a GPU would give it, made up: every number follows from a few."""

from __future__ import annotations

from benchmarks.model import Cell, GpuFacts, Outcome, Result, Row, Timing

from .synthetic import environment

GPU = GpuFacts(
    name="NVIDIA H200",
    capability="9.0",
    multiprocessors=132,
    memory=141 << 30,
    cache=60 << 20,
    driver="580.65.06",
    cuda="13.0",
    clock=1980,
    memory_clock=3201,
    bandwidth=4e12,
)

LARGE, MIDDLE, SMALL = (256, 64, 112, 112), (256, 512, 7, 7), (8, 16, 8, 8)

# Our time over the floor's, and peers' over ours.
_OURS = 1.6
_PEERS = {"torch": 3.0, "cudnn": 2.0, "compile": 2.5}

# Seconds of a whole call.
_WHOLE = {"backnorm": 20e-6, "torch": 25e-6, "cudnn": 40e-6, "compile": 50e-6}


def timing(seconds):
    return Timing(seconds, seconds / 1.01, seconds * 1.01, 12)


def row(cell, *, ours=_OURS, peers=None, whole=None):
    """Return a row; `ours` is over the floor, `peers` over ours, `whole` in seconds."""
    floor = cell.least_traffic / GPU.bandwidth
    seconds = floor * ours
    calls = {**_WHOLE, **(whole or {})} if cell.nbytes <= 1 << 20 else {}

    def outcome(name, seconds):
        return Outcome(
            name,
            "allocate",
            "ok",
            timing(seconds),
            whole=timing(calls[name]) if name in calls else None,
        )

    return Row(
        cell,
        (
            outcome("backnorm", seconds),
            Outcome("floor", "out", "ok", timing(floor)),
            *(outcome(name, seconds * t) for name, t in {**_PEERS, **(peers or {})}.items()),
            Outcome("jax", "allocate", "missing", detail="jax has no cuda device"),
        ),
    )


def cells():
    for op in ("backward", "forward", "inference"):
        for layout in ("NCX", "NXC"):
            for suite, shape in (("batch256", LARGE), ("batch256", MIDDLE), ("small", SMALL)):
                yield Cell(suite, op, shape, layout, "float32")


def result(rows=None):
    rows = tuple(row(cell) for cell in cells()) if rows is None else tuple(rows)
    return Result(environment(), {"rounds": 4, "warm": 0.02}, rows, GPU)
