"""The table, the summary and the plot of `models`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from benchmarks.results import (
    DASH,
    Result,
    column,
    geometric_mean,
    mean_text,
    milliseconds,
    ratio_plot,
    ratio_text,
)

__all__ = ["models_lines", "models_plot", "models_table"]


def models_table(result: Result) -> pd.DataFrame:
    """Return a row for each case and variant; ratios are to the framework's own layers."""
    frame, tables = result.frame, []
    case = ["model", "shape", "layout", "precision", "allocator"]
    for variant in _variants(frame):
        table = frame[case].assign(
            variant=variant,
            ms=column(frame, f"{variant}.step").map(milliseconds),
            ratio=column(frame, f"{variant}.ratio").map(lambda r: ratio_text(r, marked=True)),
            error=column(frame, f"{variant}.error").map("{:.1e}".format),
        )
        tables.append(table[table.ms != DASH])
    return pd.concat(tables).sort_index(kind="stable") if tables else frame[case]


def models_lines(result: Result) -> list[str]:
    """Return the means of each of our variants, and the reasons why others have no time."""
    frame, lines = result.frame, []
    for variant, base, found in _ratios(frame):
        line = f"{variant} / {base}: {mean_text(found)}"
        for quantity in ("normalization", "memory"):
            mean = column(frame, f"{variant}.{quantity}") / column(frame, f"{base}.{quantity}")
            line += f"; {quantity} {ratio_text(geometric_mean(mean))}"
        lines.append(line)
    for _, row in frame[frame.notes != ""].iterrows():
        lines.append(f"{row.model} {row['shape']} {row.layout} {row.precision}: {row.notes}")
    return lines


def models_plot(result: Result, path: Path) -> None:
    """Plot the ratio of our step to the framework's own, for each case and variant."""
    frame = result.frame
    names = frame.model + " " + frame["shape"] + " " + frame.layout
    with ratio_plot(path, (8.5, 1.2 + 0.17 * len(frame)), "x") as axes:
        for number, (variant, base, found) in enumerate(_ratios(frame)):
            marker = "os^Dv"[number % 5]
            axes.plot(found, found.index, marker, ms=4, label=f"{variant} / {base}")
        axes.set_yticks(frame.index, names, fontsize="small")
        axes.invert_yaxis()
        axes.set_xlabel("our step / the framework's")


def _variants(frame: pd.DataFrame) -> list[str]:
    return [name.removesuffix(".step") for name in frame if name.endswith(".step")]


def _ratios(frame: pd.DataFrame) -> Iterator[tuple[str, str, pd.Series]]:
    """Yield our variants, the variants they are compared with, and the ratios of their steps.

    Compiled variants are compared with the framework's own layers, compiled.
    """
    variants = _variants(frame)
    for variant in (name for name in variants if name.startswith("backnorm")):
        for base in (name for name in variants if not name.startswith("backnorm")):
            found = (frame[f"{variant}.ratio"] / frame[f"{base}.ratio"]).dropna()
            if len(found) and ("compiled" in variant) == ("compiled" in base):
                yield variant, base, found
