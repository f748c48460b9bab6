"""`python -m benchmarks`: options in; a table, files and an exit status out."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.campaign import Campaign
from benchmarks.device import PLACES
from benchmarks.model import Cell, GpuFacts, Outcome, Result, Row, Timing
from benchmarks.report import read_result
from benchmarks.table import bench_table, summary_lines
from benchmarks.turns import Settings
from tests import required

FAKES = Path(__file__).parent
ROOT = Path(__file__).parents[2]
HASTY = ("--rounds", 1, "--samples", 1, "--warm-up", 0)

# The module of each peer, and the contestant that needs it.
MODULES = {"torch": "torch", "tensorflow": "tensorflow", "jax": "jax"}


def rows():
    def outcome(name, form, seconds):
        return Outcome(name, form, "ok", Timing(seconds, seconds, seconds, 1))

    for layout, peer in (("NCX", 2e-3), ("NXC", 5e-4)):
        yield Row(
            Cell("resnet50", "backward", (50, 512, 7, 7), layout, "float32"),
            (
                outcome("backnorm", "out", 1e-3),
                outcome("floor", "out", 8e-4),
                outcome("torch", "out", peer),
                outcome("torch", "allocate", 1e-9),
                Outcome("jax", "allocate", "missing", detail="jax is not installed"),
            ),
        )


@pytest.fixture
def measured(monkeypatch):
    """Make up the measurements; returns what campaigns were asked for."""
    campaigns = []

    def run(self, advance):
        campaigns.append(self)
        self.rows.extend(rows())

    monkeypatch.setattr(Campaign, "run", run)
    return campaigns


def test_a_table_and_what_it_comes_to(cli, measured):
    result = cli()
    assert result.exit_code == 0
    assert "resnet50: backward (50,512,7,7) NCX float32 1 ms 25.1 0.50 torch 1.25" in (
        " ".join(result.stdout.split())
    )
    assert (
        "ratio to the best peer: 1.00 in the geometric mean of 2 cells, 1 or less in 1; "
        "worst 2.00 backward (50,512,7,7) NXC float32"
    ) in result.stdout
    assert "ratio to the floor: 1.25 in the geometric mean" in result.stdout
    assert "jax missing in 2 of 2 cells: jax is not installed" in result.stdout
    assert result.stderr.startswith("backnorm: 18 cells, about ")
    assert result.stderr.count("\n") == 1


def test_options_reach_the_campaign(cli, measured):
    options = "--suite 3d,small --op forward --dtype float64,float32 --layout NXC --peers torch,jax"
    assert cli(*options.split(), *HASTY, "--limit", 3).exit_code == 0
    (campaign,) = measured
    assert {cell.suite for cell in campaign.cells} == {"3d", "small"}
    assert {cell.dtype for cell in campaign.cells} == {"float64", "float32"}
    assert {cell.op for cell in campaign.cells} == {"forward"}
    assert {cell.layout for cell in campaign.cells} == {"NXC"}
    assert list(campaign.contestants) == ["backnorm", "backnorm-float32", "floor", "torch", "jax"]
    settings = campaign.result().settings
    assert (settings["rounds"], settings["samples"]) == (1, 1)
    assert (settings["warm"], settings["limit"]) == (0.0, 3.0)


def test_a_quick_run_is_short(cli, measured):
    assert cli("--quick", "--peers", "none").exit_code == 0
    (campaign,) = measured
    assert sum(campaign.expected()) < 60
    assert list(campaign.contestants) == ["backnorm", "backnorm-float32", "floor"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--suite", "resnet51"),
        ("--op", "sideways"),
        ("--dtype", "int8"),
        ("--layout", "NCHW"),
        ("--peers", "mxnet"),
    ],
)
def test_unknown_names_are_refused(refused, option, value):
    line = refused(option, value)
    assert f"{option}: unknown; got '{value}'; accepted: " in line


def test_files_are_written_and_compared(cli, measured, tmp_path):
    folder = tmp_path / "a" / "b"
    result = cli("--out", folder)
    assert result.exit_code == 0
    assert {file.name for file in folder.iterdir()} >= {"result.json", "report.md", "report.html"}
    assert f"wrote {folder / 'report.html'}" in result.stdout
    compared = cli("--compare", folder / "result.json", folder / "result.json")
    assert compared.exit_code == 0
    assert compared.stdout.startswith("# ")
    assert len(measured) == 1


def test_a_folder_that_cannot_be_is_refused_before_anything_is_measured(
    refused, measured, tmp_path
):
    (tmp_path / "file").touch()
    assert "file" in refused("--out", tmp_path / "file")
    assert measured == []


@pytest.mark.parametrize("command", ["plans", "models"])
def test_out_with_the_end_of_a_folder_is_refused(refused, tmp_path, command):
    line = refused(command, "--out", f"{tmp_path}/out.json/")
    assert "out.json/: must be the path of a file, not of a folder" in line


def test_nothing_to_compare_is_refused(refused, tmp_path):
    assert "absent.json" in refused("--compare", tmp_path / "absent.json", tmp_path / "absent.json")


def test_an_interruption_keeps_what_is_there(cli, monkeypatch, tmp_path):
    def run(self, advance):
        self.rows.extend(rows())
        raise KeyboardInterrupt

    monkeypatch.setattr(Campaign, "run", run)
    result = cli("--out", tmp_path)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "backnorm: interrupted"
    assert len(json.loads((tmp_path / "result.json").read_text())["rows"]) == 2
    assert "ratio to the best peer" in result.stdout


def test_an_interruption_before_the_first_cell_writes_nothing(cli, monkeypatch, tmp_path):
    def run(self, advance):
        raise KeyboardInterrupt

    monkeypatch.setattr(Campaign, "run", run)
    assert cli("--out", tmp_path).exit_code == 130
    assert list(tmp_path.iterdir()) == []


def test_inexact_results_of_ours_are_a_failure(cli, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setitem(peers.CONTESTANTS["cpu"], "backnorm", "fakes:WrongOurs")
    options = ["--suite", "small", "--op", "backward", "--layout", "NCX", "--peers", "none"]
    result = cli(*options, *HASTY)
    assert result.exit_code == 1
    assert "backnorm: not exact: backward (1,4,2,2) NCX float32: allocate: dgamma" in result.stderr


@pytest.mark.long
@pytest.mark.peer
def test_all_peers_take_part(tmp_path):
    """From the command line to the files, with whatever is installed here."""
    command = [sys.executable, "-m", "benchmarks", "--suite", "small", "--layout", "NXC"]
    done = subprocess.run(
        [*command, *map(str, HASTY), "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["rows"]) == 4
    for row in result["rows"]:
        found = {outcome["contestant"]: outcome["status"] for outcome in row["outcomes"]}
        assert set(found) == set(peers.CONTESTANTS["cpu"])
        assert set(found.values()) <= {"ok", "missing"}, row
        if required.ALL:
            assert set(found.values()) == {"ok"}, row
    assert "backnorm" in result["environment"]["versions"]
    # LLVM's name of what this runs on.
    assert result["environment"]["microarchitecture"]


@pytest.fixture
def fake_gpu(monkeypatch):
    """Put a made-up GPU in the place of a real one."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setitem(PLACES, ("cuda", "quiet"), "fake_gpu:FakeGpu")


def test_an_unknown_device_is_refused_in_one_line(refused):
    assert "--device: unknown; got 'gpu'; accepted: cpu, cuda" in refused("--device", "gpu")


def test_each_condition_has_its_usual_settings(cli, measured, monkeypatch):
    monkeypatch.setattr(Campaign, "check", lambda self: None)
    for more in ((), ("--condition", "after-convolution"), ("--samples", 2)):
        assert cli("--quick", "--warm-up", 0.5, *more).exit_code == 0
    assert [campaign.condition for campaign in measured] == ["quiet", "after-convolution", "quiet"]
    quiet, after, fewer = (campaign.result().settings for campaign in measured)
    assert quiet == dataclasses.asdict(Settings(warm=0.5))
    assert after == dataclasses.asdict(Settings(rounds=10, samples=5, warm=0.5, least=0.0))
    assert fewer == dataclasses.asdict(Settings(samples=2, warm=0.5))


def test_the_condition_is_in_table_and_files(cli, measured, monkeypatch, tmp_path):
    monkeypatch.setattr(Campaign, "check", lambda self: None)
    shown = {}
    for condition in ("quiet", "after-convolution"):
        folder = tmp_path / condition
        shown[condition] = cli("--condition", condition, "--out", folder).stdout
        assert read_result(folder / "result.json").condition == condition
    assert ", calls in a row. " in " ".join(shown["quiet"].split())
    after = " ".join(shown["after-convolution"].split())
    assert ", each call right after a convolution. " in after
    files = [tmp_path / condition / "result.json" for condition in shown]
    compared = cli("--compare", *files).stdout
    assert "- condition: quiet, now after-convolution" in compared


def test_an_unknown_condition_is_refused_in_one_line(refused, measured):
    line = refused("--condition", "noisy")
    assert "--condition: unknown; got 'noisy'; accepted: quiet, after-convolution" in line
    assert measured == []


def test_a_gpu_has_no_convolution_before_a_call(refused, measured, tmp_path):
    line = refused(
        "--device", "cuda", "--condition", "after-convolution", "--out", tmp_path / "new"
    )
    assert (
        "--condition: is not for --device cuda; got 'after-convolution'; accepted: quiet"
    ) in line
    assert measured == []
    assert list(tmp_path.iterdir()) == []


def test_without_pytorch_there_is_no_convolution(refused, measured, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setitem(PLACES, ("cpu", "after-convolution"), "fakes:WithoutPyTorch")
    line = refused("--condition", "after-convolution", "--out", tmp_path / "new")
    assert "--condition after-convolution: PyTorch, whose convolution it is, is not" in line
    assert measured == []
    assert list(tmp_path.iterdir()) == []


def test_a_device_reaches_the_campaign(cli, measured, monkeypatch):
    monkeypatch.setattr(Campaign, "check", lambda self: None)
    assert cli("--device", "cuda", "--suite", "batch256").exit_code == 0
    (campaign,) = measured
    assert campaign.device == "cuda"
    assert {cell.shape[0] for cell in campaign.cells} == {256}
    assert list(campaign.contestants) == list(peers.CONTESTANTS["cuda"])


def test_peers_of_another_device_are_unknown(refused, measured):
    assert "--peers: unknown; got 'numpy'; accepted: torch" in refused(
        "--device", "cuda", "--peers", "numpy"
    )
    assert "--peers: unknown; got 'cudnn'" in refused("--peers", "cudnn")
    assert measured == []


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_done(
    refused, measured, monkeypatch, tmp_path
):
    # Whatever this machine has: hidden from PyTorch.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = refused("--device", "cuda", "--out", tmp_path / "new")
    assert "--device cuda: " in line
    assert "; got " in line
    assert "; accepted: cpu; or cuda where PyTorch is built with CUDA" in line
    assert list(tmp_path.iterdir()) == []
    assert measured == []


@pytest.mark.peer
def test_a_run_on_a_gpu_from_options_to_files(cli, fake_gpu, tmp_path):
    options = ("--suite", "small", "--layout", "NCX", "--peers", "torch", *HASTY)
    done = cli("--device", "cuda", *options, "--out", tmp_path)
    assert done.exit_code == 0, done.stderr
    assert read_result(tmp_path / "result.json").gpu.name == "Fake"
    assert "ours / best peer at batch 256: not measured" in done.stdout
    assert "whole call on (8,16,8,8), dispatch included, ours / PyTorch: worst" in done.stdout
    assert "## Whole calls" in (tmp_path / "report.md").read_text()


def test_the_table_of_a_gpu_shows_the_devices_time_and_the_targets():
    def outcome(name, form, seconds):
        return Outcome(name, form, "ok", Timing(seconds, seconds, seconds, 1))

    cell = Cell("batch256", "backward", (256, 64, 112, 112), "NCX", "float32")
    outcomes = [
        outcome("backnorm", "allocate", 1e-3),
        outcome("floor", "out", 8e-4),
        outcome("cudnn", "allocate", 2e-3),
    ]
    gpu = GpuFacts("NVIDIA H200", "9.0", 132, 141 << 30, 60 << 20, "580", "13.0", 0, 0, 4.8e12)
    environment = Campaign([], {}, 1, Settings()).result().environment
    result = Result(environment, {}, (Row(cell, tuple(outcomes)),), gpu)
    table = bench_table(result)
    assert table.caption.plain.startswith("NVIDIA H200, capability 9.0. time and GB/s: medians")
    assert "copying what must be moved at the least (backward 3, forward 2" in table.caption.plain
    texts = [next(iter(column.cells)) for column in table.columns]
    assert texts[1:] == ["1 ms", "4110", "0.50", "cudnn", "1.25"]
    lines = summary_lines(result)
    assert any(line.startswith("ours / best peer at batch 256: worst 0.50") for line in lines)
    assert any("x beyond the L2 (60 MiB): worst 86 %" in line for line in lines)


def test_control_c_ends_it_in_one_line(tmp_path, heed_interrupts):
    command = [sys.executable, "-m", "benchmarks", "--suite", "sweep", "--peers", "none"]
    running = subprocess.Popen(
        [*command, "--rounds", "1000", "--limit", "1000"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,
    )
    assert running.stderr.readline().startswith("backnorm: 64 cells")
    running.send_signal(signal.SIGINT)
    try:
        stdout, stderr = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 130
    assert stderr == "backnorm: interrupted\n"
    assert "Traceback" not in stdout
