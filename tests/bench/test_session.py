"""What becomes of contestants of every kind, in one process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.device import Host
from benchmarks.model import Cell, Timing
from benchmarks.peers.floor import Floor
from benchmarks.peers.ours import Backnorm, BacknormInFloat32
from benchmarks.session import Session

_spec = importlib.util.spec_from_file_location("fakes", Path(__file__).parent / "fakes.py")
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)


def session(*kinds, announce=lambda name: None):
    return Session({kind.name: kind for kind in kinds}, 1, announce)


def outcomes(cell, settings, *kinds, excluded=()):
    return session(*kinds).measure(cell, excluded, settings).outcomes


def test_right_results_are_timed(cell, hasty):
    (outcome,) = outcomes(cell, hasty, fakes.Right)
    assert (outcome.contestant, outcome.form, outcome.status) == ("torch", "allocate", "ok")
    assert outcome.timing.samples == 4
    assert 0 < outcome.timing.p20 <= outcome.timing.median <= outcome.timing.p80


def test_wrong_results_are_timed_and_said_to_be_wrong(cell, hasty):
    (outcome,) = outcomes(cell, hasty, fakes.Wrong)
    assert outcome.status == "inaccurate"
    assert outcome.timing is not None
    assert outcome.detail.startswith("dx: ")


@pytest.mark.parametrize(
    ("kind", "status", "detail"),
    [
        (fakes.Absent, "missing", "absent is not installed"),
        (fakes.Declining, "unsupported", "not today"),
        (fakes.Raising, "unsupported", "RuntimeError: out of luck"),
        (fakes.RaisingOurs, "crashed", "ValueError: no such thing"),
        (fakes.Greedy, "unsupported", "what it needs besides would take"),
    ],
)
def test_whoever_does_not_take_part_is_shown(cell, hasty, kind, status, detail):
    other, outcome = sorted(
        outcomes(cell, hasty, fakes.Right, kind), key=lambda o: o.contestant != "torch"
    )
    assert other.status == "ok"
    assert outcome.status == status
    assert outcome.timing is None
    assert outcome.detail.startswith(detail)


def test_ours_must_be_exact_to_the_last_place(cell, hasty):
    (outcome,) = outcomes(cell, hasty, fakes.WrongOurs)
    assert outcome.status == "inaccurate"
    assert "dgamma" in outcome.detail


def test_the_excluded_do_not_run(cell, hasty):
    assert outcomes(cell, hasty, fakes.Segfaulting, excluded=("tensorflow",)) == ()


@pytest.mark.parametrize("op", ["backward", "forward", "inference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["NCX", "NXC"])
def test_ours_and_the_floor_do_every_cell(hasty, op, dtype, layout):
    cell = Cell("small", op, (3, 5, 7), layout, dtype)
    row = session(Backnorm, BacknormInFloat32, Floor).measure(cell, (), hasty)
    found = {(o.contestant, o.form): o.status for o in row.outcomes}
    names = ["backnorm", "backnorm-float32"] if dtype == "float32" else ["backnorm"]
    forms = [(name, form) for name in names for form in ("out", "allocate")]
    assert found == dict.fromkeys([*forms, ("floor", "out")], "ok")
    assert row.ratio_to_floor() > 0


def test_the_floor_moves_nothing_where_there_is_next_to_nothing(hasty):
    cell = Cell("small", "backward", (1, 1), "NCX", "float32")
    (outcome,) = outcomes(cell, hasty, Floor)
    assert outcome.status == "unsupported"


def test_arrays_too_large_for_the_machine_are_left_out(hasty):
    cell = Cell("small", "backward", (1 << 40, 64), "NCX", "float32")
    (outcome,) = outcomes(cell, hasty, fakes.Right)
    assert outcome.status == "unsupported"
    assert "GB" in outcome.detail


def test_the_arrays_serve_all_operations(cell, hasty):
    seen = []

    class Watching(fakes.Right):
        def prepare(self, cell, data):
            seen.append(data)
            return {}

    running = session(Watching)
    running.measure(cell, (), hasty)
    running.measure(Cell("small", "forward", cell.shape, "NCX", "float32"), (), hasty)
    running.measure(Cell("small", "forward", cell.shape, "NXC", "float32"), (), hasty)
    assert seen[0] is seen[1]
    assert seen[1] is not seen[2]


def test_it_says_whose_code_runs(cell, hasty):
    heard = []
    session(fakes.Right, announce=heard.append).measure(cell, (), hasty)
    # Starting; preparing and checking; two turns.
    assert heard == ["torch", "", "torch", "torch", "torch", ""]


def test_versions_are_those_of_who_started(cell):
    assert session(fakes.Right, fakes.Absent).versions == {"right": "1.1"}


def test_memory_is_spoilt_before_each_contestants_first_call(cell, hasty):
    heard = []

    class Watching(Host):
        def hold(self, data):
            heard.append("hold" if data is not None else "let go")

        def spoil(self, data):
            heard.append("spoil")

        def once(self, call):
            heard.append("call")
            return super().once(call)

    kinds = {"torch": fakes.Right, "jax": fakes.Wrong}
    Session(kinds, 1, lambda name: None, Watching()).measure(cell, (), hasty)
    assert heard == ["let go", "hold", "spoil", "call", "spoil", "call"]


def test_a_time_that_is_known_is_not_measured(cell, hasty):
    class Known(fakes.Right):
        def prepare(self, cell, data):
            return {"out": Timing(2.0, 1.0, 3.0, 7)}

    (outcome,) = outcomes(cell, hasty, Known)
    assert (outcome.form, outcome.status) == ("out", "ok")
    assert outcome.timing == Timing(2.0, 1.0, 3.0, 7)


def test_an_error_that_the_device_does_not_survive_ends_the_session(cell, hasty):
    class Broken(Host):
        def survived(self):
            raise RuntimeError("broken")

    broken = Session({"numpy": fakes.Raising}, 1, lambda name: None, Broken())
    with pytest.raises(RuntimeError, match="broken"):
        broken.measure(cell, (), hasty)


def test_on_the_cpu_there_is_one_time(cell, hasty):
    (outcome,) = outcomes(cell, hasty, fakes.Right)
    assert outcome.whole is None
