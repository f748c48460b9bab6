"""`python -m benchmarks`: options in; a table, files and an exit status out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import __main__ as command
from benchmarks.operators import DeviceRefusedError


@pytest.fixture
def cli():
    return lambda *arguments: CliRunner().invoke(command.app, list(map(str, arguments)))


@pytest.fixture
def measured(monkeypatch):
    """Make up the measurements; returns what runs were made with, and the cells."""
    runs, cells = [], []

    class Run(command.OperatorRun):
        failing = False
        ends = None

        def __init__(self, contestants, place, threads, settings):
            super().__init__(contestants, place, threads, settings)
            runs.append((list(contestants), place, threads, settings))

        def measure(self, cell):
            if self.ends is not None and len(cells) == 1:
                raise self.ends
            cells.append(cell)
            if self.failing:
                self.failures.append(f"{cell}: wrong")
            fields = {"suite": cell.suite, "op": cell.op, "layout": cell.layout}
            times = {"backnorm.out": 2e-3, "torch.out": 1e-3, "floor.out": 1e-3, "notes": ""}
            return {**fields, "shape": "2,64,4,4", "dtype": cell.dtype, **times}

    monkeypatch.setattr(command, "OperatorRun", Run)
    return Run, runs, cells


SMALL = ("operator", "--suite", "small", "--layout", "NXC")


def test_operator_prints_table_and_writes_result_and_plot(cli, measured, tmp_path):
    done = cli(*SMALL, "--out", tmp_path / "a" / "b")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("**2.00** (slower)") == 4
    assert "backnorm: 2.00 in the geometric mean (slower in 4 of 4" in done.stdout
    file = json.loads((tmp_path / "a" / "b" / "result.json").read_text())
    assert len(file["rows"]) == 4
    assert file["environment"]["command"] == "operator"
    assert file["environment"]["condition"] == "quiet"
    assert (tmp_path / "a" / "b" / "plot.svg").exists()


def test_operator_passes_options_to_run(cli, measured):
    options = "--suite 3d,small --op forward --dtype float64,float32 --layout NXC --peer torch,jax"
    done = cli("operator", *options.split(), "--rounds", 7, "--threads", 1)
    assert done.exit_code == 0, done.output
    _, ((contestants, place, threads, settings),), cells = measured
    assert contestants == ["backnorm", "backnorm-float32", "floor", "torch", "jax"]
    assert (place, threads, settings.rounds) == ("benchmarks.host:Host", 1, 7)
    assert {cell.suite for cell in cells} == {"3d", "small"}
    assert {cell.dtype for cell in cells} == {"float64", "float32"}
    assert {cell.op for cell in cells} == {"forward"}


def test_operator_after_convolution_changes_place_and_settings(cli, measured):
    assert cli("operator", "--quick", "--condition", "after-convolution").exit_code == 0
    _, ((_, place, _, settings),), _ = measured
    assert place == "benchmarks.host:AfterConvolution"
    assert (settings.rounds, settings.least) == (10, 0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("operator --suite resnet51", "resnet51"),
        ("operator --peer mxnet", "mxnet"),
        ("operator --device gpu", "gpu"),
        ("operator --condition noisy", "noisy"),
        ("operator --device cuda --condition after-convolution", "quiet"),
        ("models --model resnet51", "resnet51"),
        ("models --variant mxnet", "mxnet"),
        ("models --batch huge", "huge"),
    ],
)
def test_command_rejects_unsupported_options_before_measuring(cli, measured, options, message):
    done = cli(*options.split())
    assert done.exit_code == 2
    assert message in done.output
    assert measured[2] == []


def test_operator_with_wrong_backnorm_results_exits_with_1(cli, measured):
    measured[0].failing = True
    done = cli(*SMALL)
    assert done.exit_code == 1
    assert done.stderr.count("not exact: ") == 4


def test_operator_when_interrupted_writes_measured_rows(cli, measured, tmp_path):
    measured[0].ends = KeyboardInterrupt()
    done = cli(*SMALL, "--out", tmp_path)
    assert done.exit_code == 130
    assert len(json.loads((tmp_path / "result.json").read_text())["rows"]) == 1


def test_operator_without_device_exits_with_2(cli, measured):
    measured[0].ends = DeviceRefusedError("no such device")
    done = cli(*SMALL)
    assert done.exit_code == 2
    assert "no such device" in done.output


def test_models_prints_table_and_writes_result(cli, monkeypatch, tmp_path):
    def measure(self, case):
        row = {"model": case.model, "shape": "2,3,4,4", "layout": case.layout, "notes": ""}
        times = {"torch.step": 0.1, "torch.ratio": 1.0, "backnorm.step": 0.2, "backnorm.ratio": 2.0}
        return {**row, "precision": case.precision, "allocator": case.allocator, **times}

    monkeypatch.setattr(command.ModelsRun, "measure", measure)
    done = cli("models", "--model", "resnet18", "--batch", "small", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert done.stdout.count("**2.00** (slower)") == 2
    file = json.loads((tmp_path / "result.json").read_text())
    assert len(file["rows"]) == 2
    assert file["environment"]["command"] == "models"
