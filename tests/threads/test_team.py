"""PyTorch's own team: which it is, that it serves, and where it does not."""

from __future__ import annotations

import shutil
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
def test_team_uses_pytorch_libgomp_in_either_import_order(drive, first):
    assert "torch/lib/libgomp" in drive("team", first)


@pytest.mark.long
def test_team_uses_pytorch_libgomp_beside_scikit_learn(drive):
    pytest.importorskip("sklearn")
    assert "torch/lib/libgomp" in drive("team", "sklearn")


@pytest.mark.long
def test_team_uses_preloaded_libiomp5(drive):
    libraries = Path(sysconfig.get_path("purelib")).parents[1]
    found = sorted(libraries.glob("libiomp5.so"))
    if not found:
        pytest.skip("intel-openmp is not installed")
    assert "libiomp5" in drive("team", "torch", LD_PRELOAD=str(found[0]))


@pytest.mark.parametrize(
    "count", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_team_has_as_many_threads_as_pytorch(drive, count):
    drive("team_size", count, OMP_NUM_THREADS=str(count))


@pytest.mark.long
def test_calls_interrupted_by_signals_stop_writing_and_keep_results(drive):
    drive("signals", 300, "torch")


def test_forked_children_do_not_use_team(drive):
    drive("forks", 20, "torch")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_team_results_do_not_depend_on_flush_mode_of_caller(drive, dtype):
    drive("flushing", 100, dtype)


@pytest.mark.sweep
def test_team_serves_beside_inductor_code(drive):
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs a C++ compiler")
    drive("inductor")
