from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.command import app as command
from benchmarks.device import PLACES
from benchmarks.model import Cell
from benchmarks.turns import Settings
from tests.required import require


@pytest.fixture
def app():
    """Return the command that `cli` runs."""
    return command


@pytest.fixture
def cell():
    return Cell("small", "backward", (2, 3, 4, 5), "NCX", "float32")


@pytest.fixture
def hasty():
    """Settings under which nothing takes long."""
    return Settings(rounds=2, samples=2, warm=0.0, least=0.0)


@pytest.fixture
def fakes(monkeypatch):
    """Let worker processes find `fakes`."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def gpu(fakes, monkeypatch):
    """Put a made-up GPU in the place of a real one; returns its contestants, by name."""
    absent = [name for name in ("torch", "jax") if importlib.util.find_spec(name) is None]
    require(not absent, ", ".join(absent))
    monkeypatch.setitem(PLACES, ("cuda", "quiet"), "fake_gpu:FakeGpu")
    return {
        "backnorm": "benchmarks.peers.cuda.ours:Backnorm",
        "floor": "benchmarks.peers.cuda.floor:Floor",
        "torch": "benchmarks.peers.cuda.native:Native",
        "cudnn": "fake_gpu:DecomposedCuDnn",
        "compile": "fake_gpu:EagerCompiled",
        "jax": "fake_gpu:JaxOnCpu",
    }
