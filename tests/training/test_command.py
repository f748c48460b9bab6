"""`backnorm train`: options in; a table, files and an exit status out."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backnorm.cli import train as command
from backnorm.cli.app import app
from backnorm.cli.train_live import training_progress, wide_progress
from backnorm.training.model import Settings, TrainingResult
from backnorm.training.session import Moment

from . import synthetic

pytest.importorskip("sklearn")

FAKES = Path(__file__).parent / "fakes"


@pytest.fixture
def cli():
    """Run the command in this process; a traceback of ours fails the test."""

    def invoke(*args):
        result = CliRunner().invoke(app, ["train", *map(str, args)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return invoke


@pytest.fixture
def made_up(monkeypatch):
    """Make up what other processes find; returns what they were asked for."""
    asked = []

    def run(result, data, watch):
        asked.append(result.settings)
        training = isinstance(result, TrainingResult)
        found = synthetic.training(seeds=1, epochs=1) if training else synthetic.wide(rounds=1)
        result.environment.versions.update({"torch": "2.13"})
        values = (
            [found.first, *found.epochs, *found.normalised]
            if training
            else [*found.checks, *found.steps]
        )
        for value in values:
            assert result.add(value)
            watch(value)

    monkeypatch.setattr(command, "run", run)
    return asked


def words(text):
    return " ".join(text.split())


def test_a_table_and_what_it_comes_to(cli, made_up):
    result = cli("--epochs", 1, "--seeds", 1)
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "PyTorch 90.00 " in text
    assert "backnorm 90.00 " in text
    assert "first step: losses 2.0e-07 apart, gradients 2.9e-06 at most (head.bias), relative" in (
        text
    )
    assert "test accuracy: +0.00 points, mean of 1 seed" in text
    assert "normalisation 0.50" in text
    assert result.stderr.startswith("backnorm: digits, 1 x 1 epochs, two networks: PyTorch, ")
    assert result.stderr.count("\n") == 1


def test_a_wide_step(cli, made_up, tmp_path):
    result = cli("--model", "resnet50", "--out", tmp_path)
    assert result.exit_code == 0
    text = words(result.stdout)
    assert "channels_last backnorm 5125 1125 22 %" in text
    assert "contiguous: times, ours over the framework's: step 0.82, normalisation, " in text
    (settings,) = made_up
    assert (settings.batch, settings.size) == (16, 224)
    assert json.loads((tmp_path / "result.json").read_text())["model"] == "resnet50"


def test_options_reach_the_training(cli, made_up):
    options = "--framework jax --dtype bfloat16 --epochs 3 --seeds 2 --batch 32 --threads 1"
    assert cli(*options.split()).exit_code == 0
    assert made_up == [Settings("jax", "bfloat16", 3, 2, 32, 1)]


def test_a_quick_run_is_little_unless_told_otherwise(cli, made_up):
    cli("--quick")
    cli("--quick", "--seeds", 3)
    cli("--quick", "--model", "resnet50")
    assert [(s.epochs, s.seeds) for s in made_up[:2]] == [(2, 1), (2, 3)]
    assert (made_up[2].batch, made_up[2].size) == (2, 64)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--framework", "theano"), "--framework: unknown; got 'theano'; accepted: torch, jax"),
        (("--model", "vgg"), "--model: unknown; got 'vgg'; accepted: digits, resnet50"),
        (("--dtype", "int8"), "--dtype: unknown; got 'int8'; accepted: float32"),
        (("--batch", 1348), "--batch: there are not so many images; got 1348"),
        (("--size", 64), "--size: says nothing to --model digits"),
        (("--model", "resnet50", "--epochs", 1), "--epochs: says nothing to --model resnet50"),
        (("--model", "resnet50", "--framework", "jax"), "--framework: cannot do --model resnet50"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(cli, made_up, options, expected):
    result = cli(*options)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"backnorm: error: {expected}")
    assert result.stderr.count("\n") == 1
    assert made_up == []


def test_a_folder_that_cannot_be_is_refused_before_any_work(cli, made_up, tmp_path):
    (tmp_path / "file").touch()
    assert cli("--out", tmp_path / "file").exit_code == 2
    assert made_up == []


def test_without_scikit_learn_the_extra_is_named(cli, made_up, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    result = cli()
    assert result.exit_code == 2
    assert "pip install 'backnorm[train]'" in result.stderr


def test_gradients_that_are_wrong_are_a_failure(cli, monkeypatch):
    def run(result, data, watch):
        first = synthetic.first_step()
        wrong = dataclasses.replace(first.gradients[3], backnorm=0.01)
        result.add(dataclasses.replace(first, gradients=(*first.gradients[:3], wrong)))

    monkeypatch.setattr(command, "run", run)
    result = cli()
    assert result.exit_code == 1
    assert "backnorm: not the same: the gradient of block1.first.weight is 1.0e-02" in result.stderr


def test_an_interruption_keeps_what_is_there(cli, monkeypatch, tmp_path):
    def run(result, data, watch):
        for value in (synthetic.first_step(), *synthetic.training().epochs[:4]):
            result.add(value)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", run)
    result = cli("--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "backnorm: interrupted"
    assert len(json.loads((tmp_path / "result.json").read_text())["epochs"]) == 4
    assert "first step: losses" in result.stdout


def test_an_interruption_before_the_first_epoch_writes_nothing(cli, monkeypatch, tmp_path):
    def run(result, data, watch):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", run)
    assert cli("--out", tmp_path).exit_code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def fake(monkeypatch):
    def choose(name):
        monkeypatch.setenv("PYTHONPATH", str(FAKES / name))

    return choose


def test_a_missing_framework_is_named_with_the_remedy(cli, fake):
    fake("missing")
    result = cli()
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "backnorm: error: --framework torch needs torch, which is not installed: "
        "pip install 'backnorm[torch]'"
    )


@pytest.mark.parametrize("model", ["digits", "resnet50"])
def test_a_crash_is_said_in_one_line(cli, fake, model):
    fake("crashing")
    result = cli("--model", model)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "backnorm: error: the process that trains with torch failed: ended by SIGSEGV: goodbye"
    )


@pytest.fixture
def at_work(fake, tmp_path, monkeypatch, heed_interrupts):
    """A command in the middle of a training, and its child."""
    fake("hanging")
    told = tmp_path / "pid"
    monkeypatch.setenv("FAKE_TORCH_PID", str(told))
    running = subprocess.Popen(
        [sys.executable, "-m", "backnorm", "train", "--quick"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    for _ in range(1200):
        if told.exists():
            break
        time.sleep(0.05)
    return running, int(told.read_text())


def test_no_process_is_left_of_a_command_that_was_killed(at_work):
    running, child = at_work
    running.kill()
    running.communicate(timeout=60)
    for _ in range(200):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    pytest.fail("the child works on")


def test_control_c_ends_everything_in_one_line(at_work):
    running, child = at_work
    running.send_signal(signal.SIGINT)
    try:
        stdout, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert stderr.splitlines()[1:] == ["backnorm: interrupted"]
    assert stdout == ""
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_nothing_moves_where_nobody_watches(capsys):
    moment = Moment(0, 0, 0, 0.5, {"own": 1.0}, {"own": 1.0}, {"own": 1.0})
    with training_progress(Settings("torch", "float32", 1, 1, 64, 1)) as watch:
        watch(moment)
    with wide_progress(synthetic.wide().settings) as watch:
        watch(synthetic.wide().steps[0])
    assert capsys.readouterr() == ("", "")


def test_a_terminal_sees_loss_accuracy_and_speed(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    values = dict.fromkeys(("own", "backnorm"), 0.5)
    rates = {"own": 1234.0, "backnorm": 2345.0}
    with training_progress(Settings("torch", "float32", 8, 5, 64, 1)) as watch:
        watch(synthetic.first_step())
        watch(synthetic.epoch(0, 0, "own", test_accuracy=0.75))
        watch(Moment(1, 2, 3, 0.25, values, values, rates))
    shown = capsys.readouterr().err
    for text in ("seed 2/5, epoch 3/8", "PyTorch", "0.5000", "50.0%", "75.0%", "1234", "2345"):
        assert text in shown
    with wide_progress(synthetic.wide().settings) as watch:
        for value in (*synthetic.wide().checks[:1], *synthetic.wide().steps[:1]):
            watch(value)
    assert "contiguous, PyTorch: 6.25 s" in capsys.readouterr().err
