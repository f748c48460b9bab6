from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cells import Cell
from benchmarks.turns import Settings


@pytest.fixture
def cell():
    return Cell("small", "backward", (2, 3, 4, 5), "NCX", "float32")


@pytest.fixture
def hasty():
    """Settings under which nothing takes long."""
    return Settings(rounds=2, samples=2, warm=0.0, least=0.0)


@pytest.fixture
def fakes(monkeypatch):
    """Let worker processes find the contestants of this folder."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
