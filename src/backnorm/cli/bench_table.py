"""The table of `backnorm bench`, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from backnorm.bench.model import OURS, PASSES, Cell, Outcome, Result, Row, geometric_mean
from backnorm.cli.render import number_texts
from backnorm.cli.text import plain

__all__ = ["bench_table", "summary_lines"]

# Cells that the summary names.
_WORST = 3


def bench_table(result: Result) -> Table:
    """Return a row a cell: our time and bandwidth, ratios to the best peer and the floor."""
    environment = result.environment
    passes = ", ".join(f"{op} {number}" for op, number in PASSES.items())
    caption = (
        f"{environment.cpu}, {environment.threads} thread{'s' if environment.threads > 1 else ''}. "
        f"time and GB/s: medians of ours, output given; GB/s count passes over x: {passes}. "
        "peer: our time over that of the best peer, each form against its like; "
        "floor: over that of moving the memory alone. Below 1 is faster."
    )
    table = Table(
        title="Batch normalisation",
        title_justify="left",
        caption=plain(caption),
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("cell", overflow="fold")
    for heading in ("time", "GB/s", "peer", "", "floor"):
        table.add_column(heading, justify="left" if not heading else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_texts(row))
    return table


def summary_lines(result: Result) -> list[str]:
    """Return the geometric means of the ratios, the worst cells, and who could not take part."""
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
    return lines + _absences(result.rows)


def _texts(row: Row) -> tuple[str, ...]:
    ours = next((o for o in row.outcomes if (o.contestant, o.form) == (OURS, "out")), None)
    best = _best(row)
    floor = row.ratio_to_floor()
    return (
        _cell_text(row.cell),
        *_ours_texts(row, ours),
        f"{row.ratio_to(best):.2f}" if best else "",
        _peer_text(best) if best else "",
        f"{floor:.2f}" if floor is not None else "",
    )


def _ours_texts(row: Row, ours: Outcome | None) -> tuple[str, str]:
    if ours is None or ours.timing is None:
        return ours.status if ours else "", ""
    time, bandwidth = number_texts(ours.timing.median, row.gigabytes_per_second(ours) or 0.0)
    return time if ours.status == "ok" else f"{time} {ours.status}", bandwidth


def _best(row: Row) -> Outcome | None:
    """Return the peer in the form in which it is fastest beside ours."""
    peers = [peer for peer in row.peers() if row.ratio_to(peer) is not None]
    return max(peers, key=lambda peer: row.ratio_to(peer) or 0.0, default=None)


def _peer_text(peer: Outcome) -> str:
    name = peer.contestant if peer.form == "out" else f"{peer.contestant}, allocating"
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
