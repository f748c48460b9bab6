"""A result as one web page that needs nothing beside itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.model import FLOOR, OURS, DeviceName, Form, Outcome, Result, Row
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
    verdict,
)
from benchmarks.report.gpu import goals, notes, whole_calls
from benchmarks.report.numbers import (
    DASH,
    bytes_text,
    machine_line,
    milliseconds,
    percent,
    ratio_text,
)
from benchmarks.report.plots import Plot, draw
from benchmarks.report.render import render
from benchmarks.report.words import (
    CONDITION_WORDS,
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

__all__ = ["to_html"]

# Losing cells in view; the rest fold away.
_MOST_LOSING = 12


def to_html(result: Result) -> str:
    """Return `result` as an HTML page with plots and sortable tables.

    Raises
    ------
    BacknormError
        If Jinja or matplotlib is not installed.
    """
    figures = summaries(result)
    suites = suite_names(figures)
    return render(
        __package__,
        "page",
        machine=_machine(result),
        headlines=[_headline(summary, result.rows) for summary in _first_of_each(figures)],
        worst=_worst(result.rows),
        suites=suites,
        summaries=[_summary_view(summary, suites) for summary in figures],
        sections=_sections(draw(result)),
        goals=goals(result),
        notes=notes(result),
        condition=condition_note(result),
        calls=whole_calls(result),
        losing=[_cell_view(row) for row in losing(result.rows)],
        most_losing=_MOST_LOSING,
        above=[_cell_view(row) for row in above_target(result)],
        targets=TARGETS[result.device],
        tables=[
            _table_view(op, dtype, rows, result.device)
            for (op, dtype), rows in groups(result.rows).items()
        ],
        environment=[*gpu_lines(result.gpu), *environment_lines(result.environment)],
        settings=settings_lines(result),
    )


def _machine(result: Result) -> str:
    environment = result.environment
    line = machine_line(environment.cpu, environment.threads, environment.date)
    if result.gpu:
        return f"{result.gpu.name} · {line}"
    return f"{line} · {CONDITION_WORDS[result.condition]}"


def _first_of_each(figures: Iterable[Summary]) -> list[Summary]:
    """Return the figures of every operation at its most important type."""
    first: dict[str, Summary] = {}
    for summary in figures:
        if summary.cells:
            first.setdefault(summary.op, summary)
    return list(first.values())


def _headline(summary: Summary, rows: Iterable[Row]) -> dict[str, Any]:
    lost = sum(
        1 for row in losing(rows) if (row.cell.op, row.cell.dtype) == (summary.op, summary.dtype)
    )
    faster = summary.mean <= 1
    return {
        "what": f"{summary.op}, {summary.dtype}",
        "mean": ratio_text(summary.mean),
        "times": ratio_text(1 / summary.mean if faster else summary.mean),
        "faster": faster,
        "cells": summary.cells,
        "lost": lost,
        "share": "" if math.isnan(summary.large_share) else percent(summary.large_share),
    }


def _worst(rows: Iterable[Row]) -> dict[str, Any] | None:
    compared = [(ratio, row) for row in rows if (ratio := row.ratio()) is not None]
    return _cell_view(max(compared, key=lambda pair: pair[0])[1]) if compared else None


def _summary_view(summary: Summary, suites: Iterable[str]) -> dict[str, Any]:
    return {
        "what": f"{summary.op}, {summary.dtype}",
        "anchor": _anchor(summary.op, summary.dtype),
        "cells": str(summary.cells),
        "mean": ratio_text(summary.mean),
        "worst": ratio_text(summary.worst.ratio() if summary.worst else None),
        "share": percent(summary.share),
        "large_share": percent(summary.large_share),
        "suites": [ratio_text(summary.suites.get(suite)) for suite in suites],
    }


def _sections(plots: Sequence[Plot]) -> list[dict[str, Any]]:
    titles = {"ratio": "Beside each peer", "roofline": "Under the roof", SWEEP: "Small to large"}
    sections = []
    for name, title in titles.items():
        chosen = [plot for plot in plots if plot.name.split("-")[0] == name]
        # The most important type is in view, the others fold away.
        dtype = chosen[0].name.split("-")[-1] if chosen else ""
        shown = [plot for plot in chosen if plot.name.endswith(dtype)]
        folded = [plot for plot in chosen if plot not in shown]
        if chosen:
            sections.append({"name": name, "title": title, "shown": shown, "folded": folded})
    return sections


def _cell_view(row: Row) -> dict[str, Any]:
    peer = best_peer(row)
    assert peer is not None, "a cell with a ratio has a best peer"
    return {
        "cell": str(row.cell),
        "ours": milliseconds(row.seconds(OURS, peer.form)),
        "peer": label(peer.contestant, peer.form),
        "theirs": milliseconds(row.seconds(peer.contestant, peer.form)),
        "ratio": ratio_text(row.ratio()),
        "lost": (row.ratio() or 0) > 1,
    }


def _table_view(op: str, dtype: str, rows: Sequence[Row], device: DeviceName) -> dict[str, Any]:
    columns, forms = peer_columns(rows), our_forms(rows)
    return {
        "title": f"{op}, {dtype}",
        "anchor": _anchor(op, dtype),
        "forms": forms,
        "peers": [label(*column) for column in columns],
        "rows": [_row_view(row, columns, forms, device) for row in rows],
        "legend": legend(rows),
    }


def _row_view(
    row: Row, columns: Sequence[tuple[str, Form]], forms: Sequence[Form], device: DeviceName
) -> dict[str, Any]:
    ratio, ours = row.ratio(), row.ours()
    speed = row.gigabytes_per_second(ours) if ours else None
    return {
        "shape": shape_text(row.cell),
        "bytes": row.cell.nbytes,
        "size": bytes_text(row.cell.nbytes),
        "layout": row.cell.layout,
        "suite": row.cell.suite,
        "times": [milliseconds(row.seconds(OURS, form)) for form in forms],
        "speed": speed_text(speed),
        "floor": milliseconds(row.seconds(FLOOR, "out")),
        "to_floor": ratio_text(row.ratio_to_floor()),
        "peers": [_peer_view(row, find(row, *column)) for column in columns],
        "ratio": ratio_text(ratio),
        "verdict": verdict(row, device),
        "bar": 0 if ratio is None else round(min(ratio, 1) * 100),
    }


def _peer_view(row: Row, outcome: Outcome | None) -> dict[str, str]:
    if outcome is None:
        return {"time": DASH, "ratio": ""}
    mark = STATUS_MARKS.get(outcome.status, "")
    if outcome.timing is None:
        return {"time": mark, "ratio": ""}
    time = milliseconds(outcome.timing.median) + mark
    return {"time": time, "ratio": ratio_text(row.ratio_to(outcome))}


def _anchor(op: str, dtype: str) -> str:
    return f"table-{op}-{dtype}"
