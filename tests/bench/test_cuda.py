"""Rows of ``--device cuda`` on CPU tensors, and PyTorch's answers where it is made up.

Device, watches and contestants are those of a real GPU. Only cuDNN's operators are PyTorch's
decompositions of them, and nothing is compiled by a C++ compiler.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types

import pytest

from benchmarks.cuda import device
from benchmarks.cuda.device import Cuda
from benchmarks.operators import OperatorRun
from benchmarks.peers import CONTESTANTS
from benchmarks.peers.base import Missing
from tests.support.required import require

GPU = {
    "backnorm": "benchmarks.peers.cuda:Backnorm",
    "floor": "benchmarks.peers.cuda:Floor",
    "torch": "benchmarks.peers.cuda:Native",
    "cudnn": "fake_gpu:DecomposedCuDnn",
    "compile": "fake_gpu:EagerCompiled",
    "jax": "fake_gpu:JaxOnCpu",
}


@pytest.fixture
def measured(fakes, cell, hasty):
    absent = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is None]
    require(not absent, ", ".join(absent))

    def measure(contestants, changes=({},)):
        with OperatorRun(contestants, "fake_gpu:FakeGpu", 1, hasty) as run:
            return [run.measure(dataclasses.replace(cell, **each)) for each in changes], run

    return measure


@pytest.mark.long
@pytest.mark.peer
def test_measure_times_all_contestants_on_all_operations_and_types(measured):
    assert GPU.keys() == CONTESTANTS["cuda"].keys()
    changes = [
        {"op": op, "layout": layout, "shape": shape}
        for op in ("backward", "forward", "inference")
        for layout, shape in (("NCX", (4, 3, 5, 7)), ("NXC", (4, 3, 5, 7)), ("NXC", (6, 5, 9)))
    ]
    changes += [{"dtype": dtype} for dtype in ("float64", "bfloat16", "float16")]
    # Beyond the size of small calls, which have the time of a whole call, too.
    changes.append({"op": "inference", "shape": (10, 3, 100, 100)})
    rows, run = measured(GPU, changes)
    for row in rows:
        assert row["notes"] == ""
        whole = row["shape"] != "10,3,100,100"
        for name in GPU.keys() - {"floor"}:
            assert row[f"{name}.allocate"] > 0
            assert (f"{name}.allocate.whole" in row) == whole
    assert run.device["name"] == "Fake"
    assert {"backnorm", "torch", "jax"} <= run.versions.keys()


@pytest.mark.long
@pytest.mark.peer
def test_measure_floor_equals_bytes_moved_over_copy_bandwidth(measured):
    arrays = {"backward": 3, "forward": 2, "inference": 2}
    rows, run = measured({"floor": GPU["floor"]}, [{"op": op} for op in arrays])
    for row, number in zip(rows, arrays.values(), strict=True):
        seconds = number * 4 * 2 * 3 * 4 * 5 / run.device["bandwidth"]
        assert row["floor.out"] == pytest.approx(seconds)


@pytest.mark.long
@pytest.mark.peer
def test_measure_notes_wrong_results_crashes_and_lack_of_memory(measured):
    contestants = {"backnorm": "fake_gpu:WrongOurs", "torch": "fake_gpu:BreakingNative"}
    (row, large), run = measured(contestants, [{}, {"shape": (40, 3, 100, 100)}])
    wrong, broken = row["notes"].split("; ")
    assert wrong.startswith("backnorm allocate inaccurate: dx[")
    assert "torch allocate crashed: exit status 1: " in broken
    assert "an illegal memory access" in broken
    assert len(run.failures) == 1
    # Three of 4.8 MB, where 16 MiB are free.
    assert "backnorm allocate unsupported: x, dy and the result would take" in large["notes"]


def pytorch(*, cuda="13.0", hip=None, available=True):
    properties = types.SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=132,
        total_memory=150 << 30,
        L2_cache_size=60 << 20,
    )
    return types.SimpleNamespace(
        __version__="2.13.0",
        __spec__=types.SimpleNamespace(name="torch"),
        version=types.SimpleNamespace(cuda=cuda, hip=hip),
        cuda=types.SimpleNamespace(
            is_available=lambda: available,
            current_device=lambda: 0,
            get_device_properties=lambda device: properties,
            mem_get_info=lambda: (100, 1000),
            memory_reserved=lambda: 30,
            memory_allocated=lambda: 20,
        ),
    )


@pytest.mark.parametrize(
    ("torch", "triton", "message"),
    [
        (None, True, "PyTorch is not installed"),
        (pytorch(cuda=None), True, "is built for the CPU alone"),
        (pytorch(cuda=None, hip="6.2"), True, "is built for ROCm"),
        (pytorch(available=False), True, "sees no GPU or no driver"),
        (pytorch(), False, "pip install triton"),
    ],
)
def test_library_without_usable_gpu_raises_missing_with_reason(monkeypatch, torch, triton, message):
    there = {"torch": torch is not None, "triton": triton}
    monkeypatch.setattr(
        device.importlib.util, "find_spec", lambda name: object() if there[name] else None
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    with pytest.raises(Missing, match=message):
        Cuda().library()


def test_facts_and_free_memory_come_from_pytorch():
    gpu = Cuda()
    gpu.torch = pytorch()
    facts = gpu.facts()
    assert (facts["name"], facts["capability"], facts["cuda"]) == ("NVIDIA H200", "9.0", "13.0")
    assert (facts["multiprocessors"], facts["cache"]) == (132, 60 << 20)
    # Memory that PyTorch holds without using it is free.
    assert gpu.free_memory() == 110
