"""A result as Markdown, as one web page that needs nothing beside itself, and as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from backnorm.errors import ArgumentValueError
from backnorm.files import atomic_writer, check_writable
from benchmarks.model import LEAST_PASSES, PASSES, Result
from benchmarks.report import tables
from benchmarks.report.figures import SWEEP, TARGETS, cells, groups, losing, summary
from benchmarks.report.gpu import goals, notes, whole_calls
from benchmarks.report.plots import Plot, draw
from benchmarks.report.result_file import write_result
from benchmarks.report.words import (
    CONDITION_WORDS,
    condition_note,
    environment_lines,
    gpu_lines,
    legend,
    percent,
    ratio_text,
    settings_lines,
    where_text,
)

__all__ = ["prepare", "to_html", "to_markdown", "write_report"]

_FILES = ("result.json", "report.md", "report.html")

# Losing cells in view; the rest fold away.
_MOST_LOSING = 12

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__, "page"),
    # Markdown is text as it is.
    autoescape=jinja2.select_autoescape(["html.jinja"]),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters["markdown"] = tables.markdown
_TEMPLATES.filters["table"] = tables.html


def to_markdown(result: Result) -> str:
    """Return the whole result as Markdown: summary, a table per operation and type, method."""
    text: str = _TEMPLATES.get_template("report.md.jinja").render(_contents(result))
    return text


def to_html(result: Result) -> str:
    """Return `result` as an HTML page with plots and sortable tables."""
    page = _TEMPLATES.get_template("page.html.jinja")
    text: str = page.render(_contents(result), sections=_sections(draw(result)))
    return text


def prepare(folder: Path) -> None:
    """Make a folder for a report, and see that its files can be written; before any work is done.

    Raises
    ------
    ArgumentValueError
        If there is something else of the name of the folder, or of a file.
    OSError
        If the folder cannot be made.
    """
    _prepare_folder(folder, *_FILES)


def write_report(result: Result, directory: str | Path) -> list[Path]:
    """Write `result.json`, `report.md` and `report.html` to a folder, and return their paths.

    The JSON comes first: whatever keeps a page from being drawn does not cost the measurements.

    Parameters
    ----------
    result : Result
    directory : str or Path
        Made, with its parents, if it does not exist.

    Raises
    ------
    BacknormError
        If the folder cannot be written to.
    """
    folder = Path(directory)
    _prepare_folder(folder)
    json, markdown, html = (folder / name for name in _FILES)
    write_result(result, json)
    _write(markdown, to_markdown(result))
    _write(html, to_html(result))
    return [json, markdown, html]


def _contents(result: Result) -> dict[str, Any]:
    """Return what both pages say."""
    frame = cells(result)
    figures = summary(frame)
    worst = frame.loc[[frame.ratio.idxmax()]] if frame.ratio.notna().any() else frame[:0]
    return {
        "machine": _machine(result),
        "gpu": result.gpu,
        "headlines": _headlines(figures, frame),
        "worst": tables.cell_table(worst),
        "summary": tables.summary_table(figures),
        "goals": goals(result),
        "notes": [note for note in (condition_note(result), *notes(result)) if note],
        "losing": tables.cell_table(losing(frame)),
        "most_losing": _MOST_LOSING,
        "above": tables.cell_table(frame[frame.near].sort_values("ratio", ascending=False)),
        "targets": _listed(TARGETS[result.device]),
        "passes": _listed(PASSES),
        "least_passes": _listed(LEAST_PASSES),
        "sweep": SWEEP,
        "groups": [
            {
                "title": f"{op}, {dtype}",
                "anchor": f"table-{op}-{dtype}",
                "table": tables.group_table(found),
                "legend": legend(found.row),
            }
            for (op, dtype), found in groups(frame)
        ],
        "calls": whole_calls(result),
        "environment": tables.facts(
            [*gpu_lines(result.gpu), *environment_lines(result.environment)]
        ),
        "settings": tables.facts(settings_lines(result)),
    }


def _machine(result: Result) -> str:
    line = where_text(result.environment, " · ")
    if result.gpu:
        return f"{result.gpu.name} · {line}"
    return f"{line} · {CONDITION_WORDS[result.condition]}"


def _headlines(figures: pd.DataFrame, frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return what the summary says of every operation at its most important type."""
    compared = figures[figures.cells > 0]
    first = compared[~compared.index.get_level_values("op").duplicated()]
    every = dict(groups(frame))
    return [
        {
            "what": f"{op}, {dtype}",
            "mean": ratio_text(found["mean"]),
            "times": ratio_text(max(found["mean"], 1 / found["mean"])),
            "faster": found["mean"] <= 1,
            "cells": int(found.cells),
            "lost": int(every[op, dtype].lost.sum()),
            # Of these; the sweep, which no mean counts, is among them.
            "compared": int(every[op, dtype].ratio.count()),
            "share": "" if pd.isna(found.large_share) else percent(found.large_share),
        }
        for (op, dtype), found in first.iterrows()
    ]


def _sections(plots: list[Plot]) -> list[dict[str, Any]]:
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


def _listed(values: dict[Any, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _write(path: Path, text: str) -> None:
    check_writable(path)
    with atomic_writer(path) as stream:
        stream.write(text.encode())


def _prepare_folder(folder: Path, *names: str) -> None:
    """Make a folder with its parents, and raise if a file of one of `names` cannot be in it.

    Raises
    ------
    ArgumentValueError
        If there is something else of that name, or a file cannot be written.
    OSError
        If the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise ArgumentValueError(str(folder), "is not a folder") from error
    for name in names:
        check_writable(folder / name)
