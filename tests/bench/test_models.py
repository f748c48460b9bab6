"""`python -m benchmarks models`: whole training steps, timed in turns."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from backnorm.errors import ArgumentValueError
from benchmarks.child import Child
from benchmarks.environment import environment, now, write_rows
from benchmarks.model import Timing
from benchmarks.models import run as run_module
from benchmarks.models.cases import (
    BATCHES,
    FRAMEWORKS,
    LAYOUTS,
    MODELS,
    PRECISIONS,
    VARIANTS,
    Case,
    Outcome,
    Row,
    cases,
)
from benchmarks.models.options import run_models
from benchmarks.models.page import frameworks_page, models_page
from benchmarks.models.run import Run, models_table, summary_lines
from benchmarks.models.steps import compare
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
    every = list(cases(tuple(MODELS), LAYOUTS, PRECISIONS, BATCHES))
    assert len(set(every)) == len(every)
    counts = {name: sum(case.model == name for case in every) for name in MODELS}
    for name, (library, shapes) in MODELS.items():
        each = 1 if library in ("flax", "keras") else 4
        assert counts[name] == each * len(shapes)
    sizes = [160, 224]
    for batch, size, count in zip(BATCHES, sizes, (8, 16), strict=True):
        few = list(cases(("resnet50", "r3d_18"), LAYOUTS[:1], PRECISIONS[:1], (batch,)))
        assert few[0] == Case("resnet50", (count, 3, size, size), "contiguous", "float32")
        # Of videos there is no large batch.
        assert [case.model for case in few[1:]] == ["r3d_18"] * (batch == "small")


def test_variants_are_those_of_the_framework_and_its_own_come_first():
    flax = Case("flax-resnet18", (2, 3, 32, 32), "channels_last", "float32")
    assert CASE.variants(("backnorm", "flax", "torch-compiled")) == (
        "torch",
        "backnorm",
        "torch-compiled",
    )
    assert flax.variants(("backnorm", "torch-compiled")) == ("flax", "backnorm")
    assert flax.variants(VARIANTS) == flax.framework.variants
    assert {each for one in FRAMEWORKS.values() for each in one.variants} == set(VARIANTS)


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
    text = models_page([path])
    assert ", 2 threads, " in text
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in text.splitlines()
        if "|" in line
    ]
    columns = (
        "layers, PyTorch, PyTorch compiled, share, ours, fused, ours compiled, normalisation, "
        "memory, error, error compiled"
    )
    assert lines[0][3:] == columns.split(", ")
    assert lines[2][:6] == [
        "resnet18",
        f"2{TIMES}40{TIMES}40",
        "channels_last",
        "20",
        "1000 ms",
        "500 ms",
    ]
    assert lines[2][6:] == ["0.20", "0.80", DASH, "0.80", DASH, DASH, DASH, "1.00"]
    assert lines[3][6:] == ["", "**0.80**", DASH, "**0.80**", DASH, DASH, "", ""]


def test_the_documentation_names_another_precision(tmp_path):
    row = dataclasses.replace(ROW, case=dataclasses.replace(CASE, precision="bfloat16"))
    path = tmp_path / "models.json"
    write_rows([dataclasses.asdict(row)], environment(2, {"torch": "1"}, now()), path)
    assert f"| 2{TIMES}40{TIMES}40, bfloat16 |" in models_page([path])


def test_the_documentation_has_other_frameworks_by_threads(tmp_path):
    shapes, paths = ((4, 3, 96, 96), (8, 3, 160, 160)), []
    for threads in (1, 2):
        rows = [
            Row(
                Case("keras-resnet50", shape, "channels_last", "float32"),
                (outcome("keras", 1.0), outcome("backnorm", 0.8), Outcome("backnorm-float32", "-")),
            )
            for shape in shapes
        ]
        paths.append(tmp_path / f"models-frameworks-{threads}.json")
        where = environment(threads, {"keras": "3"}, now())
        write_rows(list(map(dataclasses.asdict, rows)), where, paths[-1])
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in frameworks_page(paths).splitlines()
        if line.startswith("|")
    ]
    name = f"keras-resnet50, 8{TIMES}160{TIMES}160"
    own = "1000 ms (1.00 to 1.00)"
    assert lines[-1] == [name, "2", own, "0.80", DASH, DASH, DASH]
    assert [line[1] for line in lines[2:]] == ["1", "1", "2", "2"]


@pytest.mark.parametrize("place", range(5))
def test_what_is_not_known_is_named(place):
    wanted = ["resnet18", "contiguous", "float32", "small", "torch"]
    wanted[place] = "nonsense"
    with pytest.raises(ArgumentValueError, match="nonsense"):
        run_models(tuple(wanted), 1, None)


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
@pytest.mark.parametrize(
    ("model", "shape", "packages"),
    [
        ("flax-resnet18", (2, 3, 32, 32), {"jax", "flax"}),
        # Smaller ones leave a number or two for each of the last channels.
        ("keras-resnet50", (4, 3, 64, 64), {"tensorflow"}),
    ],
)
def test_other_frameworks_train_too(model, shape, packages):
    case = Case(model, shape, "channels_last", "float32")
    run = Run([case], ("backnorm-float32",), 1, HASTY)
    run.measure(lambda _: None)
    own, ours = run.rows[0].outcomes
    assert (own.detail, ours.detail) == ("", "")
    assert own.layers == 0
    assert ours.layers == {"flax-resnet18": 20, "keras-resnet50": 53}[model]
    for each in (own, ours):
        assert each.step.median > 0
        assert each.error < 0.5
        assert each.normalization is each.memory is None
    assert {"backnorm", *packages} <= run.environment().versions.keys()


@pytest.mark.long
def test_where_pytorchs_layers_fail_nothing_is_compared(monkeypatch):
    driver = "tests.bench.drivers.failing_models_worker"
    monkeypatch.setattr(run_module, "Child", lambda module, variables: Child(driver, variables))
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


class Steps:
    """A trainer whose steps give one gradient each, by their variants; 1 is exact."""

    def __init__(self, gradients):
        self.gradients = gradients

    def exact(self):
        return [np.ones(3)]

    def step(self, variant):
        return SimpleNamespace(layers=2, gradients=lambda: [np.full(3, self.gradients[variant])])


@pytest.mark.parametrize("gradient", [np.nan, np.inf, 1e34, -20.0])
def test_gradients_that_are_none_are_not_timed(gradient):
    own, ours = "torch", "backnorm"
    found = compare(Steps({own: 1.001, ours: gradient}), (own, ours))
    assert (found[own].detail, found[own].layers) == ("", 2)
    assert "gradients are" in found[ours].detail
    # Beside those of the framework's own layers nothing is judged.
    found = compare(Steps({own: gradient, ours: 1.0}), (own, ours))
    assert "gradients are" in found[own].detail
    assert found[ours].detail == "not compared: torch failed"
    for each in found.values():
        assert each.step is None
        assert each.error is None or np.isfinite(each.error)


@pytest.mark.long
def test_a_process_that_ends_is_an_outcome(monkeypatch):
    monkeypatch.setattr(run_module, "_PATIENCE", 0.01)
    run = Run([CASE], ("backnorm",), 1, HASTY)
    run.measure(lambda _: None)
    assert "no answer" in run.rows[0].outcomes[0].detail
