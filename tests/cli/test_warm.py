"""`backnorm warm`: options, report, exit status; and how the demo uses it."""

from __future__ import annotations

import json

import pytest

from backnorm.cli import demo
from backnorm.cli import warm as warm_module
from backnorm.cli.warm import warm_up
from backnorm.warm import crew, records
from backnorm.warm.crew import Outcome
from backnorm.warm.jobs import Job


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def worked(monkeypatch, folder):
    """Pretend to compile: a kernel a job, `failing` jobs excepted; the list of jobs."""
    jobs = []

    def work_off(wanted, processes):
        for job in wanted:
            jobs.append(job)
            if job.dtype == "float16":
                yield Outcome(job, error="no such luck")
            else:
                name = f"{job}.nbc"
                (folder / name).write_bytes(b"code")
                yield Outcome(job, ("shared.nbc",), (name,))

    (folder / "shared.nbc").write_bytes(b"code")
    monkeypatch.setattr(warm_module, "work_off", work_off)
    return jobs


def test_float32_alone_is_compiled_if_nothing_else_is_said(cli, worked):
    cli("warm")
    assert {job.dtype for job in worked} == {"float32"}
    assert {job.operation for job in worked} == {
        "backward",
        "forward",
        "frozen",
        "phases",
        "inference",
    }


def test_types_and_operations_can_be_chosen(cli, worked):
    cli("warm", "--dtype", "float64", "--dtype", "bfloat16", "--op", "inference")
    assert {(job.dtype, job.operation) for job in worked} == {
        ("float64", "inference"),
        ("bfloat16", "inference"),
    }


def test_all_is_everything(cli, worked):
    assert cli("warm", "--all").exit_code == 1
    assert {job.dtype for job in worked} == {"float64", "float32", "float16", "bfloat16"}


def test_the_report_says_what_was_done_and_where(cli, worked, folder):
    first = cli("warm", "--op", "backward")
    assert first.exit_code == 0
    lines = first.stdout.splitlines()
    assert lines[0].startswith("2 kernels compiled, 1 were there already, in 0.")
    assert lines[1] == f"{folder}: 3 kernels, 0.0 MB"
    assert len(lines) == 2
    again = cli("warm", "--op", "backward")
    assert again.stdout.startswith("0 kernels compiled, 3 were there already")
    assert len(worked) == 2


def test_the_report_as_json(cli, worked, folder):
    report = json.loads(cli("warm", "--op", "backward", "--prune", "--json").stdout)
    assert report["compiled"] == 2
    assert report["present"] == 1
    assert report["failures"] == []
    assert report["seconds"] >= 0
    assert report["cache"] == {
        "folder": str(folder),
        "kernels": 3,
        "nbytes": sum(path.stat().st_size for path in folder.iterdir()),
    }
    assert report["removed"] == {"kernels": 0, "nbytes": 0}


def test_pruning_is_told(cli, worked, monkeypatch):
    monkeypatch.setattr(records, "prune", lambda: records.Size(1, 2_345_678))
    out = cli("warm", "--op", "backward", "--prune").stdout
    assert "\n1 kernel, 2.3 MB removed, not used for 30 days\n" in out


def test_a_kernel_that_does_not_compile_fails_the_command(cli, worked):
    result = cli("warm", "--dtype", "float16", "--dtype", "float32", "--op", "inference")
    assert result.exit_code == 1
    assert result.stdout.startswith("2 kernels compiled")
    assert result.stderr.splitlines() == [
        f"backnorm: cannot compile inference float16 {geometry}: no such luck"
        for geometry in ("columns", "segments")
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--dtype", "float8"), "--dtype: is not known; got float8; accepted: float64, float32"),
        (("--op", "sideways"), "--op: is not known; got sideways; accepted: backward, forward"),
    ],
)
def test_what_is_not_known_is_refused(refused, arguments, says):
    assert says in refused("warm", *arguments)


def test_a_cache_that_cannot_be_written_is_refused(refused, folder, monkeypatch):
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(folder / "file"))
    assert str(folder / "file") in refused("warm")


def test_without_anything_missing_no_process_is_started(monkeypatch):
    monkeypatch.setattr(records, "ready", lambda _: True)
    monkeypatch.setattr(crew.subprocess, "Popen", None)
    assert warm_up([Job("backward", "float32", "segments")]).compiled == 0
    demo._compile_ahead(list(demo.cases()), demo.load_layers())


def test_the_demo_compiles_what_it_needs_and_no_more(monkeypatch):
    asked = []
    monkeypatch.setattr(demo, "warm_up", asked.extend)
    monkeypatch.setattr(demo.backnorm, "get_num_threads", lambda: 2)
    demo._compile_ahead(list(demo.cases()), demo.load_layers())
    assert {job.operation for job in asked} == {"backward"}
    assert {job.dtype for job in asked} == {"float64", "float32", "float16", "bfloat16"}
    assert len(asked) == len(set(asked)) == 8


def test_the_demo_does_not_start_one_process_to_wait_for_it(monkeypatch):
    monkeypatch.setattr(demo, "warm_up", None)
    monkeypatch.setattr(demo.backnorm, "get_num_threads", lambda: 1)
    demo._compile_ahead(list(demo.cases()), demo.load_layers())


def test_the_demo_runs_without_a_cache(monkeypatch, folder):
    (folder / "file").write_text("in the way")
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(folder / "file"))
    monkeypatch.setattr(demo.backnorm, "get_num_threads", lambda: 2)
    demo._compile_ahead(list(demo.cases()), demo.load_layers())
