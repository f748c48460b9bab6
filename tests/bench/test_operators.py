"""Rows of `operator`, of contestants that are right, wrong, missing, or end their process."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path

import pytest

from benchmarks import operators, worker
from benchmarks.operators import DeviceRefusedError, OperatorRun
from benchmarks.peers import CONTESTANTS, PLACES, peers
from tests.support import required

FOLDER = Path(__file__).parent
HOST = "benchmarks.host:Host"


class InProcess:
    """A child whose work is done in this process."""

    def __init__(self, module, patience):
        self.work = worker.Work()

    def ask(self, method, *arguments):
        return getattr(self.work, method)(*arguments)

    def stop(self):
        pass


@pytest.fixture
def in_processes(fakes, cell, hasty):
    """Measure cells with contestants of `fakes`; returns the rows and the run."""

    def measure(contestants, cells=(cell,), **options):
        places = {name: f"fakes:{place}" for name, place in contestants.items()}
        with OperatorRun(places, HOST, 1, hasty, **options) as run:
            return [run.measure(each) for each in cells], run

    return measure


@pytest.fixture
def measured(in_processes, monkeypatch):
    """Measure without processes."""
    monkeypatch.setattr(operators, "Child", InProcess)
    monkeypatch.syspath_prepend(FOLDER)
    yield in_processes
    gc.unfreeze()


def timed(row):
    return {name for name in row if "." in name and not name.endswith(".spread")}


def test_measure_of_right_contestants_returns_their_times(measured, cell):
    (row,), run = measured({"backnorm": "OursInBothForms", "torch": "Right"})
    assert timed(row) == {"backnorm.out", "backnorm.allocate", "torch.allocate"}
    assert all(0 < row[name] < 1 for name in timed(row))
    assert row["shape"] == "2,3,4,5"
    assert (row["op"], row["layout"], row["dtype"], row["notes"]) == (
        cell.op,
        cell.layout,
        cell.dtype,
        "",
    )
    assert run.versions == {"right": "1.1"}
    assert run.failures == []


def test_measure_times_each_contestant_by_its_own_calls(measured):
    (row,), _ = measured({"backnorm": "Ours", "torch": "Slow"})
    assert 0.02 < row["torch.allocate"] < 0.5
    assert row["backnorm.allocate"] < 0.02


def test_measure_wrong_peer_is_not_timed(measured):
    (row,), run = measured({"backnorm": "Ours", "jax": "Wrong"})
    assert timed(row) == {"backnorm.allocate"}
    assert row["notes"].startswith("jax allocate inaccurate: dx: ")
    assert run.failures == []


@pytest.mark.parametrize(
    ("fake", "note"),
    [
        ("WrongOurs", "backnorm allocate inaccurate: dgamma[2] = "),
        ("RaisingOurs", "backnorm allocate crashed: ValueError: no such, thing"),
    ],
)
def test_measure_of_failing_backnorm_records_failure(measured, cell, fake, note):
    (row,), run = measured({"backnorm": fake})
    assert timed(row) == set()
    assert row["notes"].startswith(note)
    assert run.failures == [f"{cell}: {row['notes']}"]


@pytest.mark.parametrize(
    ("name", "fake", "note"),
    [
        ("onednn", "Absent", "onednn allocate missing: absent is not installed"),
        ("numpy", "Declining", "numpy allocate unsupported: not today"),
        ("numpy", "Raising", "numpy allocate unsupported: RuntimeError: out of luck"),
    ],
)
def test_measure_contestant_without_result_is_noted(measured, name, fake, note):
    (row,), _ = measured({"backnorm": "Ours", name: fake})
    assert timed(row) == {"backnorm.allocate"}
    assert row["notes"] == note


def test_measure_of_contestant_beyond_memory_notes_unsupported(measured):
    (row,), _ = measured({"numpy": "Greedy"})
    assert row["notes"].startswith("numpy allocate unsupported: the temporaries would take ")


def test_measure_notes_crashed_process_and_restarts_it(in_processes, cell):
    cells = [dataclasses.replace(cell, layout=layout) for layout in ("NXC", "NCX")]
    rows, _ = in_processes({"tensorflow": "Segfaulting"}, cells)
    assert rows[0]["notes"] == "tensorflow allocate crashed: ended by SIGSEGV: goodbye"
    assert timed(rows[0]) == set()
    assert timed(rows[1]) == {"tensorflow.allocate"}


@pytest.mark.long
def test_measure_notes_process_that_exits_or_hangs(in_processes):
    contestants = {"numpy": "ExitingAtStart", "tensorflow": "Hanging"}
    (row,), _ = in_processes(contestants, patience=10.0)
    assert row["notes"] == (
        "numpy allocate crashed: exit status 7; tensorflow allocate crashed: no answer in 10 s"
    )


@pytest.mark.parametrize("memory", [0.0, 1e12])
def test_measure_releases_arrays_after_each_turn_if_memory_is_short(memory, measured, monkeypatch):
    methods = []

    class Recorded(InProcess):
        def ask(self, method, *arguments):
            methods.append(method)
            return super().ask(method, *arguments)

    monkeypatch.setattr(operators, "Child", Recorded)
    monkeypatch.setattr(operators, "available_memory", lambda: memory)
    (row,), _ = measured({"backnorm": "OursInBothForms", "torch": "Right"})
    assert timed(row) == {"backnorm.out", "backnorm.allocate", "torch.allocate"}
    work = methods.count("prepare") + methods.count("turn")
    assert methods.count("release") == (0 if memory else work)


def test_measure_on_absent_device_raises_device_refused_error(measured, cell, hasty):
    run = OperatorRun({"torch": "fakes:Right"}, "fakes:AbsentHost", 1, hasty)
    with run, pytest.raises(DeviceRefusedError, match="no such device"):
        run.measure(cell)


def every_operation(cell):
    return [
        dataclasses.replace(cell, op=op, layout=layout)
        for op in ("backward", "forward", "inference")
        for layout in ("NCX", "NXC")
    ]


@pytest.mark.long
@pytest.mark.peer
def test_measure_times_each_cpu_contestant_unless_missing(cell, hasty):
    with OperatorRun(CONTESTANTS["cpu"], HOST, 1, hasty) as run:
        rows = [run.measure(each) for each in every_operation(cell)]
    for row in rows:
        notes = row["notes"].split("; ") if row["notes"] else []
        assert all(" missing: " in note for note in notes), row
        absent = {note.split()[0] for note in notes}
        if required.ALL:
            assert not absent
        if row["op"] == "inference":
            absent.add("backnorm-reproducible")
        assert {name.split(".")[0] for name in timed(row)} | absent == set(CONTESTANTS["cpu"])


@pytest.mark.long
@pytest.mark.peer
def test_measure_after_convolution_times_backnorm_and_numpy(cell, hasty):
    contestants = {name: CONTESTANTS["cpu"][name] for name in ("backnorm", "numpy")}
    with OperatorRun(contestants, PLACES["cpu", "after-convolution"], 1, hasty) as run:
        row = run.measure(cell)
    assert timed(row) == {"backnorm.out", "backnorm.allocate", "numpy.allocate"}


def test_peers_of_cpu_exclude_backnorm_itself():
    assert "backnorm" not in peers("cpu")
    assert {"torch", "numpy", "backnorm-reproducible"} <= {*peers("cpu")}
