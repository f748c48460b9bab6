"""The table of `python -m benchmarks`, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from backnorm.cli.render import captioned_table, number_texts
from backnorm.cli.text import counted, plain
from benchmarks.model import (
    LEAST_PASSES,
    PASSES,
    Cell,
    Outcome,
    Result,
    Row,
    geometric_mean,
)
from benchmarks.report.gpu import goals
from benchmarks.report.words import CONDITION_WORDS, processor_text, speed_text

__all__ = ["bench_table", "summary_lines"]

# Cells that the summary names.
_WORST = 3


def bench_table(result: Result) -> Table:
    """Return a row a cell: our time and bandwidth, ratios to the best peer and the floor."""
    table = captioned_table("Batch normalisation", plain(_caption(result)), (0, 1, 0, 0))
    table.add_column("cell", overflow="fold")
    for heading in ("time", "GB/s", "peer", "", "floor"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_texts(row))
    return table


def _caption(result: Result) -> str:
    environment, gpu = result.environment, result.gpu
    passes = ", ".join(f"{op} {number}" for op, number in PASSES.items())
    if gpu is None:
        threads = counted(environment.threads, "thread")
        where = f"{processor_text(environment)}, {threads}, {CONDITION_WORDS[result.condition]}. "
        ours = "medians of ours, output given"
        floor = "over that of moving the memory alone"
    else:
        where = f"{gpu.name}, capability {gpu.capability}. "
        ours = "medians of ours on the device"
        least = ", ".join(f"{op} {number}" for op, number in LEAST_PASSES.items())
        floor = f"over that of copying what must be moved at the least ({least})"
    return (
        f"{where}time and GB/s: {ours}; GB/s count passes over x: {passes}. "
        "peer: our time over that of the best peer, each form against its like; "
        f"floor: {floor}. Below 1 is faster."
    )


def summary_lines(result: Result) -> list[str]:
    """Return means of the ratios, the worst cells, a GPU's targets, and who took no part."""
    lines = []
    compared = [(ratio, row) for row in result.rows if (ratio := row.ratio()) is not None]
    ratios = [ratio for ratio, _ in compared]
    if compared:
        worst = sorted(compared, key=lambda pair: -pair[0])[:_WORST]
        won = sum(ratio <= 1.0 for ratio in ratios)
        lines.append(
            f"ratio to the best peer: {geometric_mean(ratios):.2f} in the geometric mean of "
            f"{len(ratios)} cells, 1 or less in {won}; "
            f"worst {'; '.join(f'{ratio:.2f} {row.cell}' for ratio, row in worst)}"
        )
    floors = [ratio for row in result.rows if (ratio := row.ratio_to_floor()) is not None]
    if floors:
        lines.append(f"ratio to the floor: {geometric_mean(floors):.2f} in the geometric mean")
    return [*lines, *goals(result), *_absences(result.rows)]


def _texts(row: Row) -> tuple[str, ...]:
    best, ours = row.best_peer(), row.ours()
    floor = row.ratio_to_floor()
    return (
        _cell_text(row.cell),
        *_ours_texts(row, ours),
        f"{row.ratio_to(best):.2f}" if best else "",
        _peer_text(best, ours) if best else "",
        f"{floor:.2f}" if floor is not None else "",
    )


def _ours_texts(row: Row, ours: Outcome | None) -> tuple[str, str]:
    if ours is None or ours.timing is None:
        return ours.status if ours else "", ""
    time, _ = number_texts(ours.timing.median, 0.0)
    speed = speed_text(row.gigabytes_per_second(ours))
    return time if ours.status == "ok" else f"{time} {ours.status}", speed


def _peer_text(peer: Outcome, shown: Outcome | None) -> str:
    """Return a peer's name, and its form if the time of ours that is shown is of the other."""
    name = peer.contestant
    if shown is not None and peer.form != shown.form:
        name += ", allocating" if peer.form == "allocate" else ", output given"
    return name if peer.status == "ok" else f"{name}, {peer.status}"


def _cell_text(cell: Cell) -> str:
    return f"{cell.suite}: {cell}"


def _absences(rows: Sequence[Row]) -> list[str]:
    """Return a line for each contestant and reason why it is not in, or is wrong in, cells."""
    cells: dict[tuple[str, str, str], set[Cell]] = {}
    for row in rows:
        for outcome in row.outcomes:
            if outcome.status != "ok":
                key = outcome.contestant, outcome.status, _reason(outcome)
                cells.setdefault(key, set()).add(row.cell)
    return [
        f"{name} {status} in {len(found)} of {len(rows)} cells: {reason}"
        for (name, status, reason), found in cells.items()
    ]


def _reason(outcome: Outcome) -> str:
    """Return what the reason has in common with those in other cells."""
    # "y: ...": the result that is wrong.
    return outcome.detail.split(":")[0] if outcome.status == "inaccurate" else outcome.detail
