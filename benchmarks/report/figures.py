"""Figures of a result that more than one page shows, in frames of pandas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import get_args

import numpy as np
import pandas as pd

from benchmarks.model import (
    FLOOR,
    OF_OURS,
    OURS,
    OURS_IN_FLOAT32,
    PASSES,
    Cell,
    DeviceName,
    Form,
    Operation,
    Result,
    Row,
    geometric_mean,
)
from benchmarks.report.words import shape_text

__all__ = [
    "PROBLEM",
    "SWEEP",
    "TARGETS",
    "cells",
    "distinct",
    "groups",
    "in_order",
    "losing",
    "mean",
    "our_forms",
    "outcomes",
    "peer_columns",
    "preferred",
    "summary",
]

#: What a cell's ratio to the best peer should be at most.
TARGETS: dict[DeviceName, dict[Operation, float]] = {
    "cpu": {"backward": 0.8, "forward": 0.9, "inference": 0.9},
    "cuda": {"backward": 0.9, "forward": 0.9, "inference": 0.9},
}

#: The suite that varies the size alone.
SWEEP = "sweep"

#: The columns that identify a cell: suites may overlap, so not the suite.
PROBLEM = ["op", "shape", "layout", "dtype"]

_KIND = ["op", "dtype"]
# The order in which types are shown; float32 is what most people train in.
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_PEERS = ("torch", "cudnn", "compile", "tensorflow", "jax", "onednn", "numpy")


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without later repetitions of a problem, which would count twice in means."""
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault(tuple(getattr(row.cell, name) for name in PROBLEM), row)
    return list(first.values())


def cells(result: Result) -> pd.DataFrame:
    """Return a line for every distinct cell, the most important operation and type first.

    Columns are those of `Cell` with the shape as text, and `nbytes`; `row`, the `Row` itself;
    `ratio` of our time to the best peer's, `in_float32` in float32 arithmetic, and `to_floor` to
    the floor's, NaN where there is none;
    whether we `lost`, or won by less than the target (`near`); and whether x alone is larger than
    the last cache (`large`).
    """
    figures = ["ratio", "in_float32", "to_floor"]
    lines = [
        (*_identity(row.cell), row.ratio(), row.ratio(OURS_IN_FLOAT32), row.ratio_to_floor(), row)
        for row in distinct(result.rows)
    ]
    columns = ["suite", *PROBLEM, "nbytes", *figures, "row"]
    frame = pd.DataFrame(lines, columns=columns).astype(dict.fromkeys(figures, float))
    for column, order in (("op", tuple(PASSES)), ("dtype", _DTYPES)):
        frame[column] = pd.Categorical(frame[column], order, ordered=True)
    frame["lost"] = frame.ratio > 1
    frame["near"] = ~frame.lost & (frame.ratio > frame.op.map(TARGETS[result.device]).astype(float))
    frame["large"] = frame.nbytes > result.caches[-1]
    return frame.sort_values(_KIND, kind="stable", ignore_index=True)


def groups(frame: pd.DataFrame) -> Iterator[tuple[tuple[Operation, str], pd.DataFrame]]:
    """Yield the cells of every operation and type, the most important first."""
    return iter(frame.groupby(_KIND, observed=True))


def mean(values: pd.Series) -> float:
    """Return the geometric mean of the values that there are; NaN if there are none."""
    return geometric_mean(values.dropna())


def losing(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the cells in which a peer is faster, the worst first."""
    return frame[frame.lost].sort_values("ratio", ascending=False, kind="stable")


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the figures of every operation and type.

    Columns: `cells`, how many were compared with a peer, and `mean`, the geometric mean of our time
    over the best peer's in these, both without the sweep: that is no workload but a curve, and how
    densely it is sampled must not weigh. `worst`, the largest ratio of all. `in_float32`, the mean
    in float32 arithmetic where that is a choice. `share` and
    `large_share`, the geometric mean of the floor's time over ours, in all cells and in those that
    are large. Then a column for every suite, the sweep too, with its mean. NaN where there is none.
    """
    workload = frame[frame.suite != SWEEP].groupby(_KIND, observed=True)
    every = frame.groupby(_KIND, observed=True)
    large = frame[frame.large].groupby(_KIND, observed=True)
    figures = pd.DataFrame(
        {
            "cells": workload.ratio.count(),
            "mean": workload.ratio.agg(mean),
            "worst": every.ratio.max(),
            "in_float32": workload.in_float32.agg(mean),
            "share": 1 / every.to_floor.agg(mean),
            "large_share": 1 / large.to_floor.agg(mean),
        },
        index=every.size().index,
    ).fillna({"cells": 0})
    compared = frame[frame.ratio.notna()]
    suites = compared.groupby([*_KIND, "suite"], observed=True).ratio.agg(mean)
    return figures.join(suites.unstack()[list(compared.suite.unique())])


def outcomes(rows: Iterable[Row]) -> pd.DataFrame:
    """Return a line for every outcome in some rows.

    Columns are those that identify the cell, its `nbytes` and text (`cell`), the contestant, the
    form, and those of its timing, NaN where it has none.
    """
    lines = [
        (*_identity(row.cell), str(row.cell), outcome.contestant, outcome.form)
        + ((t.median, t.p20, t.p80, t.samples) if (t := outcome.timing) else (np.nan,) * 4)
        for row in rows
        for outcome in row.outcomes
    ]
    names = ["suite", *PROBLEM, "nbytes", "cell", "contestant", "form"]
    times = ["median", "p20", "p80", "samples"]
    return pd.DataFrame(lines, columns=[*names, *times]).astype(dict.fromkeys(times, float))


def preferred(rows: Iterable[Row]) -> pd.DataFrame:
    """Return what was timed, one form of a contestant in a cell: output given if it has that."""
    frame = outcomes(rows)
    timed = frame[frame["median"].notna()].sort_values("form", ascending=False, kind="stable")
    return timed.drop_duplicates([*PROBLEM, "contestant"]).sort_index()


def in_order(contestants: Iterable[str]) -> list[str]:
    """Return names in the order shown, each once: ours, peers, the floor."""
    known = {name: i for i, name in enumerate((*OF_OURS, *_PEERS))}
    return sorted(
        {*contestants}, key=lambda name: (name == FLOOR, known.get(name, len(known)), name)
    )


def peer_columns(rows: Iterable[Row]) -> list[tuple[str, Form]]:
    """Return the peers of some rows with their forms, in the order shown.

    Timed or not, but without those that are not installed: a legend names them.
    """
    found = {
        (outcome.contestant, outcome.form)
        for row in rows
        for outcome in row.outcomes
        if outcome.contestant not in (OURS, FLOOR) and outcome.status != "missing"
    }
    names = in_order(name for name, _ in found)
    return sorted(found, key=lambda pair: (names.index(pair[0]), pair[1]))


def our_forms(rows: Iterable[Row]) -> list[Form]:
    """Return the forms that some rows have times of ours in; both if they have none."""
    found = {o.form for row in rows for o in row.outcomes if o.contestant == OURS and o.timing}
    return [form for form in get_args(Form) if form in found or not found]


def _identity(cell: Cell) -> tuple[object, ...]:
    return cell.suite, cell.op, shape_text(cell), cell.layout, cell.dtype, cell.nbytes
