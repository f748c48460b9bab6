"""Processes that compile: outcomes, failures, and their end."""

from __future__ import annotations

import os

import pytest

from backnorm.warm import crew
from backnorm.warm.crew import work_off
from backnorm.warm.jobs import Job

# A process that answers with its number, and one that breaks down where it is told to.
_ECHO = """
import json, os, sys
for line in sys.stdin:
    job = json.loads(line)
    if job["dtype"] == "bad":
        os._exit(3)
    name = f"{job['operation']}.nbc"
    print(json.dumps({"used": [str(os.getpid())], "made": [name]}), flush=True)
"""


def job(name, dtype="float32"):
    return Job(name, dtype, "segments")


@pytest.fixture
def echo(monkeypatch):
    monkeypatch.setattr(crew, "_START", _ECHO)


def test_every_job_has_an_outcome(echo):
    jobs = [job(str(i)) for i in range(20)]
    outcomes = list(work_off(jobs, 3))
    assert {outcome.job for outcome in outcomes} == set(jobs)
    assert all(outcome.made == (f"{outcome.job.operation}.nbc",) for outcome in outcomes)
    assert not any(outcome.error for outcome in outcomes)
    assert 1 <= len({outcome.used for outcome in outcomes}) <= 3


def test_no_job_needs_no_process(monkeypatch):
    monkeypatch.setattr(crew.subprocess, "Popen", None)
    assert list(work_off([], 2)) == []


def test_a_process_that_breaks_down_costs_its_own_job_alone(echo):
    jobs = [job("1"), job("2", "bad"), job("3"), job("4", "bad"), job("5")]
    outcomes = {outcome.job: outcome for outcome in work_off(jobs, 1)}
    for each in jobs:
        expected = "its process ended with status 3" if each.dtype == "bad" else ""
        assert outcomes[each].error == expected


def test_processes_end_with_the_iterator(echo, monkeypatch):
    started = []
    start = crew._start
    monkeypatch.setattr(crew, "_start", lambda: started.append(start()) or started[-1])
    outcomes = work_off([job(str(i)) for i in range(50)], 2)
    next(outcomes)
    outcomes.close()
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_what_a_job_raises_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path))
    (outcome,) = work_off([Job("unknown", "float32", "segments")], 1)
    assert outcome.error == "KeyError: 'unknown'"


def test_files_of_the_cache_are_seen(tmp_path):
    from backnorm.warm.worker import _Watch

    watch = _Watch(tmp_path)
    kernel = tmp_path / "kernel-1.nbc"
    for event, arguments in (
        ("open", (str(kernel), "r", 0)),
        ("open", (str(tmp_path / "tmp1.tmp"), "w", 0)),
        ("open", ("/elsewhere/kernel-2.nbc", "r", 0)),
        ("open", (7, "r", 0)),
        ("open", (b"bytes", "r", 0)),
        ("os.rename", (str(tmp_path / "tmp1.tmp"), tmp_path / "kernel-3.nbc", -1, -1)),
        ("os.rename", ("a", "b", -1, -1)),
        ("import", (os.fspath(kernel), None, None, None, None)),
    ):
        watch(event, arguments)
    assert watch.used == {"kernel-1.nbc"}
    assert watch.made == {"kernel-3.nbc"}
