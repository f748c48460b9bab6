from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from backnorm.bench.device import PLACES
from backnorm.bench.model import Cell
from backnorm.bench.turns import Settings


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
    if absent:
        message = f"not installed: {', '.join(absent)}"
        if os.environ.get("CI") or os.environ.get("BACKNORM_REQUIRE_PEERS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    monkeypatch.setitem(PLACES, ("cuda", "quiet"), "fake_gpu:FakeGpu")
    return {
        "backnorm": "backnorm.bench.peers.cuda.ours:Backnorm",
        "floor": "backnorm.bench.peers.cuda.floor:Floor",
        "torch": "backnorm.bench.peers.cuda.native:Native",
        "cudnn": "fake_gpu:DecomposedCuDnn",
        "compile": "fake_gpu:EagerCompiled",
        "jax": "fake_gpu:JaxOnCpu",
    }
