"""PyTorch's own team: which it is, that it serves, and where it does not."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import pytest

from backnorm import machine

pytestmark = [
    pytest.mark.skipif(machine.processors() < 2, reason="needs two processors"),
    pytest.mark.skipif("sys.platform != 'linux'", reason="GOMP_parallel is looked for on Linux"),
]


@pytest.fixture(autouse=True)
def with_torch():
    pytest.importorskip("torch")


@pytest.mark.long
@pytest.mark.parametrize("first", ["torch", "backnorm"])
def test_it_serves_whatever_is_imported_first(drive, first):
    assert "torch/lib/libgomp" in drive("team", first)


@pytest.mark.long
def test_the_libgomp_of_scikit_learn_is_another(drive):
    pytest.importorskip("sklearn")
    assert "torch/lib/libgomp" in drive("team", "sklearn")


@pytest.mark.long
def test_an_openmp_runtime_that_was_loaded_before_serves_pytorch_and_us(drive):
    libraries = Path(sysconfig.get_path("purelib")).parents[1]
    found = sorted(libraries.glob("libiomp5.so"))
    if not found:
        pytest.skip("intel-openmp is not installed")
    assert "libiomp5" in drive("team", "torch", LD_PRELOAD=str(found[0]))


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_it_has_as_many_threads_as_pytorch(drive, count):
    drive("team_size", count, OMP_NUM_THREADS=str(count))


@pytest.mark.long
def test_signals_come_before_or_after_a_call(drive):
    drive("signals", 300, "torch")


def test_forked_children_stay_out_of_it(drive):
    drive("forks", 20, "torch")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_results_do_not_depend_on_the_mode_of_any_thread(drive, dtype):
    drive("flushing", 100, dtype)


@pytest.mark.sweep
def test_inductor_may_bring_an_openmp_runtime_of_its_own(drive):
    if "CI" in os.environ and not os.environ.get("PATH"):
        pytest.skip("no compiler")
    drive("inductor")
