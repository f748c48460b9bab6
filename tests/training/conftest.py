from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from . import synthetic


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    """What is trained is timed with the benchmark's parts, which are not installed."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)


@pytest.fixture
def training():
    return synthetic.training()


@pytest.fixture
def wide():
    return synthetic.wide()


@pytest.fixture(scope="session")
def require():
    """Go on if a module is there; without it skip, or fail where nothing must be missing."""

    def check(module):
        if importlib.util.find_spec(module) is None:
            message = f"{module} is not installed, so nothing is trained with it"
            if os.environ.get("CI") or os.environ.get("BACKNORM_REQUIRE_PEERS") == "1":
                pytest.fail(message)
            pytest.skip(message)

    return check
