"""The Markdown shows every cell, every peer, and what was lost."""

from __future__ import annotations

import dataclasses
import re

import pytest

from benchmarks.model import Cell, Outcome, Row, geometric_mean
from benchmarks.report import to_markdown
from benchmarks.report.figures import cells, distinct, losing, summary
from benchmarks.report.words import DASH, TIMES, bytes_text, milliseconds, ratio_text

from . import synthetic


@pytest.fixture(scope="module")
def text():
    return synthetic.squeezed(to_markdown(synthetic.result()))


def section(text, title):
    return text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_distinct_cell_has_a_row(text, result):
    rows = 0
    for title in re.findall(r"^## (\w+, \w+)$", text, re.MULTILINE):
        rows += sum(TIMES in line for line in section(text, title).splitlines())
    assert rows == len(distinct(result.rows)) == len(result.rows) - 1


def test_tables_are_rectangular(text):
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(columns) == 1, block


def test_losing_cells_are_listed_worst_first(text, result):
    lost = losing(cells(result))
    assert len(lost) > 3
    listed = section(text, "Losing cells")
    assert [line.split("|")[1].strip() for line in listed.splitlines()[3:] if line] == [
        str(row.cell) for row in lost.row
    ]
    assert lost.ratio.is_monotonic_decreasing
    assert lost.ratio.min() > 1
    assert len(lost) == sum((row.ratio() or 0) > 1 for row in distinct(result.rows))


def test_what_was_not_timed_is_shown_and_explained(text):
    float64 = section(text, "backward, float64")
    assert "| n/s |" in float64
    assert "n/s: oneDNN does not support this (17 times: float64 | not a type)" in float64
    float32 = section(text, "backward, float32")
    assert "| crashed |" in float32
    assert "crashed: PyTorch ended its process (2 times: signal SIGSEGV)" in float32
    assert "not installed: TensorFlow (49 times: no module 'tensorflow')" in float32
    forward = section(text, "forward, float32")
    assert re.search(r"\| [\d.]+‡ \([\d.]+\) \|", forward)
    assert "‡: JAX computed and timed" in forward


def test_means_leave_out_the_sweep_and_repetitions(result):
    figures = summary(cells(result))
    assert figures.cells["backward", "float32"] == 17
    assert [*figures.columns[6:]] == ["resnet50", "small", "sweep"]
    assert figures.sweep.isna().tolist() == [False] + [True] * 5
    workload = [
        row.ratio()
        for row in distinct(result.rows)
        if (row.cell.op, row.cell.dtype) == ("backward", "float32") and row.cell.suite != "sweep"
    ]
    assert figures["mean"]["backward", "float32"] == geometric_mean(workload)


def test_means_in_float32_arithmetic_stand_beside_the_others(result, text):
    figures = summary(cells(result))
    in_float32 = [
        row.ratio("backnorm-float32")
        for row in distinct(result.rows)
        if (row.cell.op, row.cell.dtype) == ("backward", "float32") and row.cell.suite != "sweep"
    ]
    assert figures.in_float32["backward", "float32"] == geometric_mean(in_float32)
    # Of float32 there is a mean for every operation, and a better one; float64 has no choice.
    assert (figures.in_float32 < figures["mean"]).tolist() == [True, False] * 3
    assert figures.in_float32.isna().tolist() == [False, True] * 3
    assert "in float32 arithmetic" in text
    # It is no peer: what is said of the best one does not change.
    without = [
        Row(row.cell, tuple(o for o in row.outcomes if o.contestant != "backnorm-float32"))
        for row in result.rows
    ]
    assert [row.ratio() for row in without] == [row.ratio() for row in result.rows]
    alone = dataclasses.replace(result, rows=tuple(without))
    assert "in float32 arithmetic" not in to_markdown(alone)


def test_a_cell_without_peers_has_no_ratio(result):
    row = result.rows[0]
    alone = Row(row.cell, tuple(o for o in row.outcomes if o.contestant == "backnorm"))
    text = to_markdown(dataclasses.replace(result, rows=(alone,)))
    assert "No peer is faster anywhere." in text
    assert "nan" not in text


def test_a_cell_that_we_could_not_do_is_shown(result):
    cell = Cell("resnet50", "backward", (2, 3), "NCX", "float32")
    row = Row(cell, (Outcome("backnorm", "out", "crashed", None, "signal"),))
    text = to_markdown(dataclasses.replace(result, rows=(row,)))
    assert "crashed: backnorm ended its process (1 time: signal)" in text


def test_a_result_without_rows_is_a_page(result):
    assert to_markdown(dataclasses.replace(result, rows=())).startswith("# Benchmark")


def test_the_condition_is_told(text, result):
    after = to_markdown(dataclasses.replace(result, condition="after-convolution"))
    assert "\nCondition: quiet. In its turn a contestant is called again and again" in text
    assert "\nCondition: after-convolution. Right before every call that is timed" in after
    assert "after-convolution" not in text


def test_numbers_have_three_digits():
    assert [milliseconds(s) for s in (1.5e-5, 1.234e-3, 0.04567, 0.5, 12.0, None)] == [
        "0.0150",
        "1.23",
        "45.7",
        "500",
        "12000",
        DASH,
    ]
    assert [bytes_text(n) for n in (64, 1024, 1536 * 1024, 2**31)] == [
        "64 B",
        "1 KiB",
        "1.5 MiB",
        "2 GiB",
    ]
    assert ratio_text(float("nan")) == ratio_text(None) == DASH
