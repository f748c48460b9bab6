"""A comparison of two results as Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from benchmarks.model import OURS, Form, geometric_mean
from benchmarks.report.markdown import table
from benchmarks.report.numbers import milliseconds, ratio_text
from benchmarks.report.words import CONDITION_WORDS, label

if TYPE_CHECKING:
    from benchmarks.report.compare import Change, Comparison

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
        yield _means(comparison)
    if comparison.control:
        moved = [change for change in comparison.control if change.beyond_noise]
        yield (
            f"Control: {len(moved)} of {len(comparison.control)} times of peers whose versions did "
            "not change are beyond noise too; as large a part of our own is to be doubted.\n"
        )
    if comparison.warnings:
        yield "## Warning: the runs differ in more than the code\n"
        yield _bullets(comparison.warnings)
    yield from _section("Slower", slower)
    yield from _section("Faster", faster)
    yield from _section(
        "Peers, beyond noise",
        [c for c in comparison.changes if c.contestant != OURS and c.beyond_noise],
    )
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


def _means(comparison: Comparison) -> str:
    """Return a table of how many times as long each contestant took as before."""
    factors: dict[tuple[str, Form], list[float]] = {}
    for change in comparison.changes:
        factors.setdefault((change.contestant, change.form), []).append(change.factor)
    return table(
        ("", "cells", "time after over before, geometric mean"),
        (
            (label(*key), str(len(found)), ratio_text(geometric_mean(found)))
            for key, found in factors.items()
        ),
    )


def _section(title: str, changes: list[Change]) -> Iterator[str]:
    if changes:
        yield f"## {title}\n"
        yield table(
            ("cell", "", "before", "after", "factor", "noise"),
            (
                (
                    str(change.cell),
                    label(change.contestant, change.form),
                    _value(change, change.before),
                    _value(change, change.after),
                    ratio_text(change.factor),
                    f"±{math.expm1(change.noise) * 100:.0f} %",
                )
                for change in changes
            ),
        )


def _value(change: Change, value: float) -> str:
    return ratio_text(value) if change.relative else f"{milliseconds(value)} ms"


def _bullets(lines: Iterable[object]) -> str:
    return "".join(f"- {' '.join(str(line).split())}\n" for line in lines)
