"""`python -m benchmarks models`: whole training steps, timed in turns."""

from __future__ import annotations

import dataclasses
import json

import pytest

from backnorm.errors import ArgumentValueError
from benchmarks.child import Child
from benchmarks.environment import environment, now, write_rows
from benchmarks.model import Timing
from benchmarks.models import run as run_module
from benchmarks.models.cases import LAYOUTS, MODELS, PRECISIONS, Case, Outcome, Row, cases
from benchmarks.models.options import run_models
from benchmarks.models.page import models_page
from benchmarks.models.run import Run, models_table, summary_lines
from benchmarks.report.words import DASH, TIMES
from benchmarks.turns import Settings

CASE = Case("resnet18", (2, 3, 40, 40), "channels_last", "float32")
HASTY = Settings(rounds=1, samples=1, warm=0.0, least=0.0)


def outcome(variant, ratio, **others):
    timing = Timing(ratio, ratio, ratio, 3)
    return Outcome(variant, step=timing, ratio=ratio, error=1e-6, **others)


ROW = Row(
    CASE,
    (
        outcome("torch", 1.0, normalization=0.2, memory=1000),
        outcome("backnorm", 0.8, normalization=0.1, memory=900, layers=20),
        outcome("torch-compiled", 0.5),
        outcome("backnorm-compiled", 0.4, layers=20),
        Outcome("backnorm-fused-compiled", "RuntimeError: no compiler"),
    ),
)


def test_every_model_has_cases_in_all_layouts_and_precisions():
    every = list(cases(tuple(MODELS), LAYOUTS, PRECISIONS, small=False))
    assert len(set(every)) == len(every) == sum(4 * len(shapes) for _, shapes in MODELS.values())
    few = list(cases(("resnet50",), LAYOUTS[:1], PRECISIONS[:1], small=True))
    assert few == [Case("resnet50", (8, 3, 160, 160), "contiguous", "float32")]


def test_ratios_are_to_what_was_compiled_if_a_variant_was():
    assert summary_lines([ROW]) == [
        "backnorm beside torch: 0.80 in the mean of 1 case, 0.80 at most",
        "backnorm-compiled beside torch-compiled: 0.80 in the mean of 1 case, 0.80 at most",
    ]


def test_the_table_says_why_something_is_missing():
    table = models_table([ROW], environment(2, {}, now()))
    lines = list(zip(*([str(c) for c in column.cells] for column in table.columns), strict=True))
    assert lines[1] == ("", "backnorm", "800 ms", "0.80", "0.50", "0.90", "1.0e-06", "20")
    assert lines[4][1:4] == ("backnorm-fused-compiled", "RuntimeError: no compiler", "")


def test_what_is_written_can_be_read(tmp_path):
    path = tmp_path / "models.json"
    write_rows([dataclasses.asdict(ROW)], environment(2, {"torch": "1"}, now()), path)
    found = json.loads(path.read_text())
    assert found["rows"][0]["case"] == {**dataclasses.asdict(CASE), "shape": [2, 3, 40, 40]}
    assert found["rows"][0]["outcomes"][1]["normalization"] == 0.1


def test_the_documentation_has_a_line_a_case_and_the_means(tmp_path):
    path = tmp_path / "models.json"
    write_rows([dataclasses.asdict(ROW)], environment(2, {"torch": "1"}, now()), path)
    text = models_page(path)
    assert ", 2 threads, " in text
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    columns = "PyTorch, PyTorch compiled, ours, fused, ours compiled, normalisation, memory"
    assert lines[0][3:] == columns.split(", ")
    assert lines[2][:5] == [
        "resnet18",
        f"2{TIMES}40{TIMES}40",
        "channels_last",
        "1000 ms",
        "500 ms",
    ]
    assert lines[2][5:] == ["0.80", DASH, "0.80", DASH, DASH]
    assert lines[3][5:] == ["**0.80**", DASH, "**0.80**", DASH, DASH]


@pytest.mark.parametrize("place", range(4))
def test_what_is_not_known_is_named(place):
    wanted = ["resnet18", "contiguous", "float32", "torch"]
    wanted[place] = "nonsense"
    with pytest.raises(ArgumentValueError, match="nonsense"):
        run_models(tuple(wanted), True, 1, None)


@pytest.mark.long
def test_a_model_is_trained_in_a_process_of_its_own():
    run = Run([CASE], ("backnorm", "backnorm-fused"), 1, HASTY)
    seen = []
    run.measure(seen.append)
    assert seen == [str(CASE)]
    (row,) = run.rows
    assert [each.variant for each in row.outcomes] == ["torch", "backnorm", "backnorm-fused"]
    for each in row.outcomes:
        assert each.detail == ""
        assert each.step.median > 0
        assert 0 < each.normalization < 10
        assert each.memory >= 0
        assert each.error < 0.1
    assert [each.layers for each in row.outcomes] == [0, 20, 20]
    assert {"backnorm", "torch", "torchvision"} <= run.environment().versions.keys()


@pytest.mark.long
def test_where_pytorchs_layers_fail_nothing_is_compared(monkeypatch):
    driver = "tests.bench.drivers.failing_models_worker"
    monkeypatch.setattr(run_module, "Child", lambda module: Child(driver))
    run = Run([CASE], ("backnorm", "torch", "backnorm-fused"), 1, HASTY)
    run.measure(lambda _: None)
    (row,) = run.rows
    assert row.outcomes == (
        Outcome("torch", "RuntimeError: no memory"),
        Outcome("backnorm", "not compared: torch failed"),
        Outcome("backnorm-fused", "not compared: torch failed"),
    )
    assert summary_lines(run.rows) == []
    assert models_table(run.rows, run.environment()).row_count == 3


@pytest.mark.long
def test_a_process_that_ends_is_an_outcome(monkeypatch):
    monkeypatch.setattr(run_module, "_PATIENCE", 0.01)
    run = Run([CASE], ("backnorm",), 1, HASTY)
    run.measure(lambda _: None)
    assert "no answer" in run.rows[0].outcomes[0].detail
