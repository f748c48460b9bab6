"""What a result comes to, also when it is but the beginning."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from backnorm.training.frameworks import LAYERS
from backnorm.training.model import Epoch, GradientDifference, TrainingResult
from backnorm.training.result_file import SCHEMA, to_dict, write_result
from backnorm.training.session import Moment

from . import synthetic


def test_accuracy_is_the_mean_of_the_seeds_that_came_to_their_end(training):
    assert training.accuracy("own") == pytest.approx(0.93)
    training.epochs = [e for e in training.epochs if (e.seed, e.number) != (1, 3)]
    assert sorted(training.finals()) == [0, 2]
    training.epochs = [e for e in training.epochs if e.number == 0]
    assert training.finals() == {}
    assert math.isnan(training.accuracy("backnorm"))


def test_times_are_medians_of_all(training):
    for layer in LAYERS:
        seconds = sorted(s for e in training.epochs if e.layer == layer for s in e.seconds)
        timing = training.step_timing(layer)
        assert timing.samples == len(seconds) == 48
        assert seconds[0] < timing.p20 < timing.median < timing.p80 < seconds[-1]
    assert training.norm_timing("own").median == pytest.approx(45e-4)
    assert training.site_seconds("backnorm")[2] == pytest.approx(15e-5)


def test_findings_are_taken_in_and_other_words_are_not(training):
    assert not training.add(Moment(0, 0, 0, 0.5, {}, {}, {}))
    assert not training.add("anything")
    count = len(training.epochs)
    assert training.add(synthetic.epoch(9, 0, "own"))
    assert len(training.epochs) == count + 1


def test_a_result_is_timed_when_both_layers_are(training):
    assert training.timed()
    training.normalised = [run for run in training.normalised if run.layer == "own"]
    assert not training.timed()
    assert training.something()
    nothing = TrainingResult(training.environment, training.settings)
    assert not nothing.something()


@pytest.mark.parametrize(
    ("ours", "dtype", "passes"),
    [
        (1e-6, "float32", True),
        (1e-4, "float32", False),
        (math.nan, "float32", False),
        (1e-14, "float64", True),
        (1e-12, "float64", False),
        (0.2, "bfloat16", True),
        (0.9, "bfloat16", False),
    ],
)
def test_gradients_of_ours_are_held_to_the_framework_s(ours, dtype, passes):
    own = {"float32": 2e-6, "float64": 0.0, "bfloat16": 0.1}[dtype]
    first = synthetic.first_step(
        gradients=(
            GradientDifference("a", 0.0, own, 0.0),
            GradientDifference("b", 0.0, 0.0, ours),
        )
    )
    failures = first.failures(dtype)
    assert bool(failures) is not passes
    if failures:
        assert failures[0].startswith("the gradient of b is ")


def test_losses_of_a_wide_step_are_held_to_the_framework_s(wide):
    assert wide.failures() == []
    wide.checks[1] = dataclasses.replace(wide.checks[1], backnorm_loss=7.0)
    assert len(wide.failures()) == 1
    assert wide.failures()[0].startswith("channels_last: ")
    wide.checks[1] = dataclasses.replace(wide.checks[1], backnorm_loss=math.nan)
    assert len(wide.failures()) == 1


def test_a_format_counts_when_both_networks_took_a_step(wide):
    assert wide.formats() == ["contiguous", "channels_last"]
    wide.steps = [s for s in wide.steps if (s.memory, s.layer) != ("channels_last", "backnorm")]
    assert wide.formats() == ["contiguous"]
    assert wide.norm_timing("contiguous", "own").median == pytest.approx(3 * 0.75 * 1.005)
    assert wide.stages("contiguous", "own")["layer1"] == pytest.approx((0.1005, 0.201))


def test_files_are_json_with_a_line_for_each_epoch(training, tmp_path):
    path = tmp_path / "result.json"
    write_result(training, path)
    text = path.read_text()
    document = json.loads(text)
    assert document["schema"] == SCHEMA
    assert document["model"] == "digits"
    assert document["settings"]["seeds"] == 3
    assert len(document["epochs"]) == 24
    assert document["sites"][0] == {
        "name": "stem",
        "shape": [64, 16, 8, 8],
        "own": 1e-4,
        "backnorm": 5e-5,
    }
    assert Epoch(**document["epochs"][0]).losses[0] == training.epochs[0].losses[0]
    assert document["gradients"][3]["name"] == "block1.first.weight"
    assert len(text.splitlines()) < 140


def test_files_of_wide_steps(wide, tmp_path):
    path = tmp_path / "result.json"
    write_result(wide, path)
    document = json.loads(path.read_text())
    assert document["model"] == "resnet50"
    assert [entry["memory"] for entry in document["formats"]] == ["contiguous", "channels_last"]
    assert len(document["steps"]) == 8


def test_what_json_cannot_hold_is_null(training):
    training.add(dataclasses.replace(training.epochs[0], losses=(math.nan, math.inf, 1.0)))
    assert to_dict(training)["epochs"][-1]["losses"] == [None, None, 1.0]


def test_a_beginning_can_be_written(training, tmp_path):
    training.epochs, training.normalised = training.epochs[:1], []
    write_result(training, tmp_path / "result.json")
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["step"] is None
    assert document["test_accuracy"] == {"own": None, "backnorm": None}
