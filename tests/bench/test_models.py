"""Rows of `models`: cases, the judgement of gradients, and training steps in processes."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from backnorm.steps import Judgement, judge
from benchmarks.child import ChildEndedError
from benchmarks.models import run as run_module
from benchmarks.models.cases import (
    BATCHES,
    FRAMEWORKS,
    LAYOUTS,
    MODELS,
    PRECISIONS,
    VARIANTS,
    Case,
    cases,
)
from benchmarks.models.run import ModelsRun

CASE = Case("resnet18", (2, 3, 40, 40), "channels_last", "float32")


def test_cases_list_each_model_in_layouts_and_precisions_of_its_framework():
    every = list(cases(tuple(MODELS), LAYOUTS, PRECISIONS, BATCHES))
    assert len(set(every)) == len(every)
    for name, (library, shapes) in MODELS.items():
        each = 1 if library in ("flax", "keras") else 4
        assert sum(case.model == name for case in every) == each * len(shapes)
    # Of videos there is no large batch.
    large = list(cases(("resnet50", "r3d_18"), LAYOUTS[:1], PRECISIONS[:1], ("large",)))
    assert large == [Case("resnet50", (16, 3, 224, 224), "contiguous", "float32")]


def test_variants_are_those_of_framework_with_its_own_first():
    wanted = ("backnorm", "flax", "torch-compiled")
    flax = Case("flax-resnet18", (2, 3, 32, 32), "channels_last", "float32")
    assert CASE.variants(wanted) == ("torch", "backnorm", "torch-compiled")
    assert flax.variants(wanted) == ("flax", "backnorm")
    assert flax.variants(VARIANTS) == FRAMEWORKS["flax"].variants


class Trainer:
    """Steps that give one gradient each, by their variants; 1 is exact."""

    def __init__(self, gradients):
        self.gradients = gradients

    def exact(self):
        return [np.ones(3)]

    def step(self, variant):
        gradient = self.gradients[variant]
        if isinstance(gradient, Exception):
            raise gradient
        return SimpleNamespace(layers=2, fused=1, gradients=lambda: [np.full(3, gradient)])


@pytest.mark.parametrize("gradient", [np.nan, np.inf, 1e34, -20.0, RuntimeError("no compiler")])
def test_judge_of_invalid_gradients_returns_detail(gradient):
    found = judge(Trainer({"torch": 1.001, "backnorm": gradient}), ("torch", "backnorm"))
    assert (found["torch"].detail, found["torch"].layers) == ("", 2)
    assert "gradients are" in found["backnorm"].detail or "no compiler" in found["backnorm"].detail
    # Without the framework's own layers nothing is judged.
    found = judge(Trainer({"torch": gradient, "backnorm": 1.0}), ("torch", "backnorm"))
    assert found["torch"].detail
    assert found["backnorm"] == Judgement("not compared: torch failed")


@pytest.mark.parametrize(("gradient", "right"), [(1.19, True), (1.21, False), (0.79, False)])
def test_judge_accepts_twice_the_error_of_framework_layers(gradient, right):
    found = judge(Trainer({"torch": 1.1, "backnorm": gradient}), ("torch", "backnorm"))
    assert (found["backnorm"].detail == "") == right


class InProcess:
    """A child with made-up answers: the seconds of each variant's steps, in turn."""

    # The median of the ratios is 0.5 in the first process and 1.0 in the second; the ratio of the
    # medians is 0.9 and 1.8.
    seconds = {  # noqa: RUF012
        "torch": ((4.0, 1.0, 2.0), (4.0, 1.0, 2.0)),
        "backnorm": ((1.8, 3.0, 1.0), (3.6, 6.0, 2.0)),
    }

    def __init__(self, module, variables, patience):
        pass

    def ask(self, method, *arguments):
        return getattr(self, method)(*arguments)

    def start(self, threads, case):
        return {"torch": "1"}

    def judge(self, variants):
        found = {name: Judgement("", 1e-6, 20 * (name != "torch")) for name in variants}
        return found | {"backnorm-compiled": Judgement("RuntimeError: no compiler")}

    def begin(self, variant):
        if variant == "backnorm-fused":
            raise ChildEndedError("ended by SIGSEGV")
        begun = self.begun[variant]
        self.begun[variant] += 1
        self.steps = iter(self.seconds[variant][begun])
        return 1000 + begun

    def step(self):
        return next(self.steps)

    def normalization(self):
        return 0.25

    def stop(self):
        pass


def test_measure_returns_step_ratio_and_memory_and_notes_failures(monkeypatch):
    monkeypatch.setattr(run_module, "Child", InProcess)
    monkeypatch.setattr(InProcess, "begun", Counter(), raising=False)
    monkeypatch.setattr(run_module, "_PAUSE", 0.0)
    run = ModelsRun(("backnorm", "backnorm-fused", "backnorm-compiled"), 1, 2, rounds=3)
    row = run.measure(CASE)
    assert (row["model"], row["shape"], row["layers"]) == ("resnet18", "2,3,40,40", 20)
    assert (row["torch.step"], row["backnorm.step"]) == (2.0, 2.5)
    assert row["torch.ratio"] == 1.0
    assert row["backnorm.ratio"] == pytest.approx(math.sqrt(0.5))
    assert (row["backnorm.ratio.1"], row["backnorm.ratio.2"]) == (0.5, 1.0)
    assert (row["backnorm.memory"], row["backnorm.error"]) == (1000.5, 1e-6)
    assert row["notes"] == (
        "backnorm-compiled: RuntimeError: no compiler; backnorm-fused: ended by SIGSEGV"
    )
    assert not any(name.startswith(("backnorm-fused.", "backnorm-compiled.")) for name in row)
    assert run.versions == {"torch": "1"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "shape", "variants", "layers"),
    [
        ("resnet18", (2, 3, 40, 40), ("backnorm", "backnorm-fused"), 20),
        pytest.param(
            "flax-resnet18", (2, 3, 32, 32), ("backnorm-float32",), 20, marks=pytest.mark.sweep
        ),
        # Smaller ones leave a number or two for each of the last channels.
        pytest.param(
            "keras-resnet50", (4, 3, 64, 64), ("backnorm-float32",), 53, marks=pytest.mark.sweep
        ),
    ],
)
def test_measure_of_each_framework_times_steps_and_judges_gradients(model, shape, variants, layers):
    run = ModelsRun(variants, 1, 2, rounds=1)
    row = run.measure(Case(model, shape, "channels_last", "float32"))
    assert row["notes"] == ""
    assert row["layers"] == layers
    own = "torch" if model == "resnet18" else model.split("-")[0]
    for name in (own, *variants):
        assert row[f"{name}.step"] > 0
        assert row[f"{name}.error"] < 0.5
        assert (row[f"{name}.normalization"] is None) == (own != "torch")
    assert row[f"{own}.ratio"] == 1.0
    assert "backnorm" in run.versions


@pytest.mark.long
def test_measure_process_without_answer_is_noted():
    row = ModelsRun(("backnorm",), 1, 1, rounds=1, patience=0.01).measure(CASE)
    assert row["notes"] == "no answer in 0 s"
