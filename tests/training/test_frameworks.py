"""Each framework, in a process of its own: both layers learn the same at first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backnorm.training.frameworks import DTYPES, FRAMEWORKS

pytestmark = pytest.mark.peer
pytest.importorskip("sklearn")

DRIVERS = Path(__file__).parent / "drivers"

# What a training with every framework begins with, whatever computes it: the mean loss of the
# first batch of seed 0, float64.
FIRST_LOSS = 2.6511936004839


def run(*arguments, timeout=280):
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module", params=FRAMEWORKS)
def found(request, tmp_path_factory, require):
    """Return what the first steps with each framework come to."""
    require(request.param)
    path = tmp_path_factory.mktemp(request.param) / "found.json"
    run(DRIVERS / "first_steps.py", request.param, path)
    return json.loads(path.read_text())


def apart(found, dtype):
    own, ours = (np.array(found["losses"][dtype][layer]) for layer in ("own", "backnorm"))
    return np.abs(own - ours) / np.abs(own)


def test_the_first_step_is_the_same(found):
    losses = found["first"]["float32"]["losses"]
    assert losses["exact"] == pytest.approx(FIRST_LOSS, rel=1e-12)
    assert losses["own"] == pytest.approx(FIRST_LOSS, rel=1e-6)
    assert losses["backnorm"] == pytest.approx(losses["own"], rel=1e-6)
    gradients = found["first"]["float32"]["gradients"]
    assert len(gradients) == 29
    assert max(gradient["between"] for gradient in gradients) < 1e-5


def test_in_float64_it_is_the_same_to_rounding(found):
    first = found["first"]["float64"]
    assert first["losses"]["backnorm"] == pytest.approx(first["losses"]["exact"], rel=1e-14)
    assert max(gradient["between"] for gradient in first["gradients"]) < 1e-13


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_as_near_the_exact_ones_as_the_framework_s(found, dtype):
    assert found["first"][dtype]["failures"] == []
    # Not all of it can be rounding away: in 16 bits something is.
    if dtype in ("float16", "bfloat16"):
        assert max(gradient["own"] for gradient in found["first"][dtype]["gradients"]) > 1e-3


def test_ten_losses_stay_together(found):
    assert apart(found, "float64").max() < 1e-10
    # An activation near 0 that rounding moves across it may part them a little.
    assert apart(found, "float32").max() < 1e-2
    assert apart(found, "float32")[:2].max() < 1e-5
    losses = found["losses"]["float32"]["backnorm"]
    assert losses[-1] < 0.6 * losses[0], "it learns"


def test_running_statistics_are_the_framework_s(found):
    """Evaluation uses them; ten steps in float64 leave no room for another answer."""
    right = found["right"]["float64"]
    assert right["own"] == right["backnorm"]
    assert right["own"] > 45, "more than guessing"


def test_layers_alone_are_timed(found):
    for seconds in found["alone"].values():
        assert len(seconds) == 9
        assert all(0 < value < 1 for value in seconds)


def test_from_the_command_line_to_the_files(tmp_path, require):
    require("torch")
    require("matplotlib")
    options = ("--quick", "--epochs", "1", "--threads", "1", "--out", tmp_path)
    stdout = run("-m", "backnorm", "train", *options)
    assert "first step: losses" in stdout
    document = json.loads((tmp_path / "result.json").read_text())
    assert len(document["epochs"]) == 2
    own, ours = document["epochs"]
    assert np.abs(np.array(own["losses"]) - ours["losses"]).max() < 0.1
    assert abs(document["test_accuracy"]["own"] - document["test_accuracy"]["backnorm"]) < 0.03
    assert document["test_accuracy"]["backnorm"] > 0.6
    assert set(document["environment"]["versions"]) == {"backnorm", "torch"}
    assert (tmp_path / "report.html").stat().st_size > 50_000


def test_a_wide_step_of_little(tmp_path, require):
    require("torch")
    require("matplotlib")
    options = ("--quick", "--rounds", "1", "--threads", "1", "--out", tmp_path)
    stdout = run("-m", "backnorm", "train", "--model", "resnet50", *options)
    assert "channels_last: times, ours over the framework's: step " in stdout
    document = json.loads((tmp_path / "result.json").read_text())
    assert len(document["steps"]) == 4
    for step in document["steps"]:
        parts = {**step["forward"], **step["backward"]}
        assert list(step["forward"]) == ["stem", "layer1", "layer2", "layer3", "layer4"]
        assert set(parts) == set(step["forward"])
        assert 0 < sum(step["forward"].values()) + sum(step["backward"].values()) < step["seconds"]


def test_what_lies_between_convolutions_is_what_is_timed(require):
    require("torch")
    forward, backward = json.loads(run(DRIVERS / "marks.py"))
    # A convolution takes 0.3 seconds, which must not be among them; a busy machine some more.
    for found, expected in (
        (forward, {"stem": 0.02, "layer1": 0.08, "layer2": 0.0}),
        (backward, {"stem": 0.03, "layer1": 0.02, "layer2": 0.06}),
    ):
        assert set(found) == set(expected)
        for stage, seconds in expected.items():
            assert seconds <= found[stage] < seconds + 0.25, (stage, found)
