"""The tables of a report: frames of text, of which pandas makes Markdown and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd
import tabulate  # noqa: F401 (pandas looks for it no sooner than a table is written)

from benchmarks.model import FLOOR, OURS, Form, Outcome, Row
from benchmarks.report.figures import our_forms, peer_columns
from benchmarks.report.words import (
    DASH,
    STATUS_MARKS,
    bytes_text,
    label,
    milliseconds,
    percent,
    ratio_text,
    shape_text,
    speed_text,
)

__all__ = ["cell_table", "facts", "group_table", "html", "markdown", "summary_table"]

_IN_FLOAT32 = "in float32 arithmetic"


def markdown(table: pd.DataFrame) -> str:
    """Return a table as Markdown; a pipe in a value would end its column and is escaped."""
    texts = table.map(lambda text: " ".join(text.replace("|", "\\|").split()))
    written: str = texts.to_markdown(index=False, tablefmt="github", disable_numparse=True)
    return f"{written}\n"


def html(table: pd.DataFrame, kind: str) -> str:
    """Return a table as HTML, of a class of the page's style."""
    written: str = table.to_html(index=False, border=0, classes=kind, justify="unset")
    return written


def facts(lines: Iterable[tuple[str, str]]) -> pd.DataFrame:
    """Return names and values."""
    return pd.DataFrame(lines, columns=["", " "], dtype=str)


def summary_table(figures: pd.DataFrame) -> pd.DataFrame:
    """Return the means of `summary`, a line for every operation and type."""
    suites = figures.drop(columns=["cells", "mean", "worst", "in_float32", "share", "large_share"])
    table = pd.DataFrame(
        {
            "": [f"{op}, {dtype}" for op, dtype in figures.index],
            "cells": figures.cells.astype(int).astype(str),
            "to the best peer": figures["mean"].map(ratio_text),
            "worst": figures.worst.map(ratio_text),
            _IN_FLOAT32: figures.in_float32.map(ratio_text),
            "share of the floor": figures.share.map(percent),
            "beyond the cache": figures.large_share.map(percent),
            **{suite: suites[suite].map(ratio_text) for suite in suites},
        }
    )
    # A GPU has no such choice.
    return table if figures.in_float32.notna().any() else table.drop(columns=_IN_FLOAT32)


def cell_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return cells beside their best peers."""
    columns = ["cell", "ours, ms", "best peer", "ms", "ratio"]
    return pd.DataFrame(map(_beside_best, frame.row), columns=columns, dtype=str)


def group_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return all that was measured in some cells; ▲ where a peer is faster, △ above the target."""
    columns, forms = peer_columns(frame.row), our_forms(frame.row)
    heads = ["shape", "layout", "to best", *(f"{form}, ms" for form in forms)]
    heads += ["GB/s", "floor, ms", "to floor"]
    heads += [f"{label(*column)}, ms (ratio)" for column in columns]
    marks = frame.lost.map({True: "▲ ", False: ""}) + frame.near.map({True: "△ ", False: ""})
    lines = [_line(row, mark, forms, columns) for row, mark in zip(frame.row, marks, strict=True)]
    return pd.DataFrame(lines, columns=[*heads, "x", "suite"], dtype=str)


def _beside_best(row: Row) -> Sequence[str]:
    peer = row.best_peer()
    assert peer is not None, "a cell with a ratio has a best peer"
    return (
        str(row.cell),
        milliseconds(row.seconds(OURS, peer.form)),
        label(peer.contestant, peer.form),
        milliseconds(row.seconds(peer.contestant, peer.form)),
        ratio_text(row.ratio()),
    )


def _line(
    row: Row, mark: str, forms: Sequence[Form], columns: Sequence[tuple[str, Form]]
) -> Sequence[str]:
    ours = row.ours()
    return (
        shape_text(row.cell),
        row.cell.layout,
        mark + ratio_text(row.ratio()),
        *(milliseconds(row.seconds(OURS, form)) for form in forms),
        speed_text(row.gigabytes_per_second(ours) if ours else None),
        milliseconds(row.seconds(FLOOR, "out")),
        ratio_text(row.ratio_to_floor()),
        *(_peer_text(row, row.find(*column)) for column in columns),
        bytes_text(row.cell.nbytes),
        row.cell.suite,
    )


def _peer_text(row: Row, peer: Outcome | None) -> str:
    if peer is None:
        return DASH
    mark = STATUS_MARKS.get(peer.status, "")
    if peer.timing is None:
        return mark
    return f"{milliseconds(peer.timing.median)}{mark} ({ratio_text(row.ratio_to(peer))})"
