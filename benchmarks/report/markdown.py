"""A result as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.model import FLOOR, OURS, PASSES, Form, Outcome, Result, Row
from benchmarks.report.figures import (
    SWEEP,
    TARGETS,
    Summary,
    above_target,
    best_peer,
    find,
    groups,
    losing,
    our_forms,
    peer_columns,
    suite_names,
    summaries,
)
from benchmarks.report.gpu import goals, notes, whole_calls
from benchmarks.report.numbers import DASH, milliseconds, percent, ratio_text
from benchmarks.report.words import (
    STATUS_MARKS,
    condition_note,
    environment_lines,
    gpu_lines,
    label,
    legend,
    settings_lines,
    shape_text,
    speed_text,
)

__all__ = ["cell_list", "summary_table", "table", "to_markdown"]


def to_markdown(result: Result) -> str:
    """Return the whole result as Markdown: summary, a table per operation and type, method."""
    figures = summaries(result)
    parts = ["# Benchmark\n", _introduction(result), summary_table(figures)]
    if result.gpu:
        parts += ["## Targets\n", _lines(goals(result))]
    parts += ["## Losing cells\n", cell_list(losing(result.rows), "No peer is faster anywhere.")]
    targets = ", ".join(f"{op} {target}" for op, target in TARGETS[result.device].items())
    parts += [
        f"## Cells won, but above the target ({targets})\n",
        cell_list(above_target(result), "None."),
    ]
    for (op, dtype), rows in groups(result.rows).items():
        parts += [f"## {op}, {dtype}\n", _group_table(rows), _lines(legend(rows))]
    head, calls = whole_calls(result)
    if calls:
        parts += ["## Whole calls, dispatch included\n", table(head, calls)]
    facts = [*gpu_lines(result.gpu), *environment_lines(result.environment)]
    parts += ["## Environment\n", table(("", ""), facts)]
    if result.settings:
        parts += ["## Settings\n", table(("", ""), settings_lines(result))]
    return "\n".join(part for part in parts if part)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; a pipe in a value would end its column and is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        "| " + " | ".join(" ".join(text.replace("|", "\\|").split()) for text in line) + " |\n"
        for line in lines
    )


def cell_list(rows: Sequence[Row], none: str) -> str:
    """Return a table of cells with their best peer; `none` if there is no cell."""
    if not rows:
        return f"{none}\n"
    return table(
        ("cell", "ours, ms", "best peer", "ms", "ratio"),
        (
            (
                str(row.cell),
                milliseconds(row.seconds(OURS, peer.form)),
                label(peer.contestant, peer.form),
                milliseconds(row.seconds(peer.contestant, peer.form)),
                ratio_text(row.ratio()),
            )
            for row in rows
            if (peer := best_peer(row))
        ),
    )


def _introduction(result: Result) -> str:
    floor = (
        "The floor is the measured time of moving that memory and no more. "
        if result.gpu is None
        else ""
    )
    passes = ", ".join(f"{op} {count}" for op, count in PASSES.items())
    return (
        "Ratios are our time over another's: below 1 we are faster. A peer is compared in its own "
        "form: `out`, the caller owns the results' memory, or `allocate`, it is newly allocated. "
        f"GB/s count passes over an array of x's size ({passes}). {floor}"
        "Means are geometric, over the distinct cells of all "
        f"suites except the {SWEEP}; on the right by suite.\n"
        + "".join(f"\n{note}\n" for note in (condition_note(result), *notes(result)) if note)
    )


def summary_table(figures: Sequence[Summary]) -> str:
    """Return a row of figures per operation and type, with a column for every suite."""
    suites = suite_names(figures)
    head = ["", "cells", "to the best peer", "worst", "share of the floor", "beyond the cache"]
    return table(
        [*head, *suites],
        (
            [
                f"{summary.op}, {summary.dtype}",
                str(summary.cells),
                f"**{ratio_text(summary.mean)}**",
                ratio_text(summary.worst.ratio() if summary.worst else None),
                percent(summary.share),
                percent(summary.large_share),
                *(ratio_text(summary.suites.get(suite)) for suite in suites),
            ]
            for summary in figures
        ),
    )


def _group_table(rows: Sequence[Row]) -> str:
    columns, forms = peer_columns(rows), our_forms(rows)
    head = ["shape", "layout", *(f"{form}, ms" for form in forms), "GB/s", "floor, ms", "to floor"]
    head += [f"{label(*column)}, ms (ratio)" for column in columns]
    return table([*head, "to best"], (_group_row(row, columns, forms) for row in rows))


def _group_row(row: Row, columns: Sequence[tuple[str, Form]], forms: Sequence[Form]) -> list[str]:
    ratio, ours = row.ratio(), row.ours()
    speed = row.gigabytes_per_second(ours) if ours else None
    return [
        shape_text(row.cell),
        row.cell.layout,
        *(milliseconds(row.seconds(OURS, form)) for form in forms),
        speed_text(speed),
        milliseconds(row.seconds(FLOOR, "out")),
        ratio_text(row.ratio_to_floor()),
        *(_peer_text(row, find(row, *column)) for column in columns),
        f"**{ratio_text(ratio)}**" if ratio is not None and ratio > 1 else ratio_text(ratio),
    ]


def _peer_text(row: Row, peer: Outcome | None) -> str:
    if peer is None:
        return DASH
    mark = STATUS_MARKS.get(peer.status, "")
    if peer.timing is None:
        return mark
    return f"{milliseconds(peer.timing.median)}{mark} ({ratio_text(row.ratio_to(peer))})"


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"- {' '.join(line.split())}\n" for line in lines)
