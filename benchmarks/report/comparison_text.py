"""A comparison of two results as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks.model import OURS, geometric_mean
from benchmarks.report.tables import markdown
from benchmarks.report.words import CONDITION_WORDS, label, milliseconds, ratio_text

if TYPE_CHECKING:
    from benchmarks.report.compare import Comparison

__all__ = ["comparison_text"]


def comparison_text(comparison: Comparison) -> str:
    """Return a comparison as Markdown."""
    return "\n".join(_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[str]:
    slower, faster = comparison.slower, comparison.faster
    yield "# Comparison\n"
    yield (
        f"Of {len(comparison.ours)} times of ours in both runs, {len(slower)} became slower and "
        f"{len(faster)} faster beyond noise. {_values(comparison)}; noise is the change that the "
        "spread of the times explains.\n"
    )
    if comparison.conditions[0] != comparison.conditions[1]:
        yield "## From one condition to the other\n"
        yield _means(comparison.changes)
    changes = comparison.changes
    control = changes[changes.control]
    if len(control):
        yield (
            f"Control: {control.beyond.sum()} of {len(control)} times of peers whose versions did "
            "not change are beyond noise too; as large a part of our own is to be doubted.\n"
        )
    if comparison.warnings:
        yield "## Warning: the runs differ in more than the code\n"
        yield _bullets(comparison.warnings)
    yield from _section("Slower", slower)
    yield from _section("Faster", faster)
    peers = changes[changes.beyond & (changes.contestant != OURS)]
    yield from _section("Peers, beyond noise", peers)
    for title, lines in (
        ("Other outcomes", comparison.statuses),
        ("Only before", comparison.only_before),
        ("Only after", comparison.only_after),
    ):
        if lines:
            yield f"## {title}\n"
            yield _bullets(lines)


def _values(comparison: Comparison) -> str:
    before, after = comparison.conditions
    if before == after:
        return (
            "Values are times over the floor's in the same cell of the same run (`ms`: the floor "
            "is missing)"
        )
    return (
        f"The conditions differ: before, {CONDITION_WORDS[before]} ({before}); after, "
        f"{CONDITION_WORDS[after]} ({after}). So values are times themselves, which also hold "
        "what the machine was like in each run"
    )


def _means(changes: pd.DataFrame) -> str:
    """Return a table of how many times as long each contestant took as before."""
    factors = changes.groupby(["contestant", "form"], sort=False).factor
    means = factors.agg(["size", geometric_mean])
    lines = [(label(*key), str(count), ratio_text(mean)) for key, count, mean in means.itertuples()]
    columns = ["", "cells", "time after over before, geometric mean"]
    return markdown(pd.DataFrame(lines, columns=columns, dtype=str))


def _section(title: str, changes: pd.DataFrame) -> Iterator[str]:
    if changes.empty:
        return
    lines = [
        (
            change.cell,
            label(change.contestant, change.form),
            _value(change.before, change.relative),
            _value(change.after, change.relative),
            ratio_text(change.factor),
            f"±{math.expm1(change.noise) * 100:.0f} %",
        )
        for change in changes.itertuples()
    ]
    columns = ["cell", "", "before", "after", "factor", "noise"]
    yield f"## {title}\n"
    yield markdown(pd.DataFrame(lines, columns=columns, dtype=str))


def _value(value: float, relative: bool) -> str:
    return ratio_text(value) if relative else f"{milliseconds(value)} ms"


def _bullets(lines: Iterable[object]) -> str:
    return "".join(f"- {' '.join(str(line).split())}\n" for line in lines)
