"""Figures of a result that more than one page shows: groups, best peers, means, losing cells."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.model import (
    FLOOR,
    ITEMSIZE,
    OURS,
    PASSES,
    Cell,
    DeviceName,
    Form,
    Operation,
    Outcome,
    Result,
    Row,
    geometric_mean,
)

__all__ = [
    "SWEEP",
    "TARGETS",
    "Summary",
    "Verdict",
    "above_target",
    "best_peer",
    "distinct",
    "find",
    "floor_share",
    "groups",
    "is_large",
    "losing",
    "our_forms",
    "peer_columns",
    "preferred",
    "problem",
    "suite_names",
    "summaries",
    "sweep",
    "verdict",
]

#: What a cell's ratio to the best peer should be at most.
TARGETS: dict[DeviceName, dict[Operation, float]] = {
    "cpu": {"backward": 0.8, "forward": 0.9, "inference": 0.9},
    "cuda": {"backward": 0.9, "forward": 0.9, "inference": 0.9},
}

#: The suite that varies the size alone.
SWEEP = "sweep"

Verdict = Literal["won", "near", "lost", "none"]

_OPS = tuple(PASSES)
# The order in which types are shown; float32 is what most people train in.
_DTYPES = ("float32", "bfloat16", "float16", "float64")
_PEERS = ("torch", "cudnn", "compile", "tensorflow", "jax", "onednn", "numpy")


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one operation at one type.

    Attributes
    ----------
    op : str
    dtype : str
    cells : int
        How many were compared with a peer, without the sweep.
    mean : float
        Geometric mean of our time over the best peer's in these cells; NaN if there are none. The
        sweep is no workload but a curve: how densely it is sampled must not weigh.
    suites : dict of str to float
        The same, suite by suite, the sweep too.
    worst : Row or None
        The cell of the largest ratio, of all.
    share, large_share : float
        Geometric mean of the floor's time over ours, output given: over all cells, and over those
        whose x alone is larger than the last cache. NaN if there are none.
    """

    op: Operation
    dtype: str
    cells: int
    mean: float
    suites: dict[str, float]
    worst: Row | None
    share: float
    large_share: float


def problem(cell: Cell) -> tuple[Operation, tuple[int, ...], str, str]:
    """Return what identifies a cell: suites may overlap, so not by the suite."""
    return cell.op, cell.shape, cell.layout, cell.dtype


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without later repetitions of a problem, which would count twice in means."""
    first: dict[object, Row] = {}
    for row in rows:
        first.setdefault(problem(row.cell), row)
    return list(first.values())


def groups(rows: Iterable[Row]) -> dict[tuple[Operation, str], list[Row]]:
    """Return the distinct rows by operation and type, the most important first."""
    found: dict[tuple[Operation, str], list[Row]] = {}
    rows = distinct(rows)
    for op in _OPS:
        for dtype in sorted(ITEMSIZE, key=_DTYPES.index):
            chosen = [row for row in rows if (row.cell.op, row.cell.dtype) == (op, dtype)]
            if chosen:
                found[op, dtype] = chosen
    return found


def sweep(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of the size sweep."""
    return [row for row in rows if row.cell.suite == SWEEP]


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
    known = {name: i for i, name in enumerate(_PEERS)}
    return sorted(found, key=lambda pair: (known.get(pair[0], len(known)), pair[0], pair[1]))


def our_forms(rows: Iterable[Row]) -> list[Form]:
    """Return the forms that some rows have times of ours in; both if they have none."""
    found = {o.form for row in rows for o in row.outcomes if o.contestant == OURS and o.timing}
    return [form for form in get_args(Form) if form in found or not found]


def best_peer(row: Row) -> Outcome | None:
    """Return the peer that the cell's ratio is to, or None."""
    compared = [(r, peer) for peer in row.peers() if (r := row.ratio_to(peer)) is not None]
    return max(compared, key=lambda pair: pair[0])[1] if compared else None


def preferred(row: Row, contestant: str) -> Outcome | None:
    """Return a contestant's timed outcome: output given if there is such a one."""
    timed = [o for o in row.outcomes if o.contestant == contestant and o.timing]
    return max(timed, key=lambda outcome: outcome.form == "out", default=None)


def find(row: Row, contestant: str, form: Form) -> Outcome | None:
    """Return the outcome of a contestant in one form, timed or not."""
    for outcome in row.outcomes:
        if (outcome.contestant, outcome.form) == (contestant, form):
            return outcome
    return None


def verdict(row: Row, device: DeviceName) -> Verdict:
    """Return "lost" where a peer is faster, "near" above the target, else "won"; "none" alone."""
    ratio = row.ratio()
    if ratio is None:
        return "none"
    if ratio > 1:
        return "lost"
    return "near" if ratio > TARGETS[device][row.cell.op] else "won"


def losing(rows: Iterable[Row]) -> list[Row]:
    """Return the distinct cells in which a peer is faster, the worst first."""
    return _worst_first(row for row in distinct(rows) if (row.ratio() or 0) > 1)


def above_target(result: Result) -> list[Row]:
    """Return the distinct cells won by less than the target of their operation, the worst first."""
    rows = distinct(result.rows)
    return _worst_first(row for row in rows if verdict(row, result.device) == "near")


def summaries(result: Result) -> list[Summary]:
    """Return the figures of every operation and type."""
    return [
        _summary(op, dtype, rows, result.caches[-1])
        for (op, dtype), rows in groups(result.rows).items()
    ]


def suite_names(figures: Iterable[Summary]) -> list[str]:
    """Return the suites that some figures are of."""
    return list(dict.fromkeys(suite for summary in figures for suite in summary.suites))


def floor_share(row: Row) -> float | None:
    """Return the floor's time over ours: the part of the attainable speed that is attained."""
    ratio = row.ratio_to_floor()
    return None if ratio is None else 1 / ratio


def is_large(cell: Cell, cache: int) -> bool:
    """Return whether x alone is larger than a cache, the last one before memory."""
    return cell.nbytes > cache


def _summary(op: Operation, dtype: str, rows: list[Row], cache: int) -> Summary:
    compared = [(r, row) for row in rows if (r := row.ratio()) is not None]
    shares = [(s, row) for row in rows if (s := floor_share(row)) is not None]
    workload = [ratio for ratio, row in compared if row.cell.suite != SWEEP]
    suites: dict[str, list[float]] = {}
    for ratio, row in compared:
        suites.setdefault(row.cell.suite, []).append(ratio)
    return Summary(
        op=op,
        dtype=dtype,
        cells=len(workload),
        mean=geometric_mean(workload),
        suites={suite: geometric_mean(ratios) for suite, ratios in suites.items()},
        worst=max(compared, key=lambda pair: pair[0], default=(0, None))[1],
        share=geometric_mean(share for share, _ in shares),
        large_share=geometric_mean(share for share, row in shares if is_large(row.cell, cache)),
    )


def _worst_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: -(row.ratio() or 0))
