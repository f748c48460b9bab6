"""Tests that run with each engine, so that each engine checks the other one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import internals

_TESTS = Path(__file__).parents[1]

# The tests of the operator's front doors and of what calls them.
_WITH_EACH = ("operator", "dialects", "graph", "cli", "conformance/test_judge.py")

NAMES = ("kernels", "numpy")


def pytest_generate_tests(metafunc):
    path = Path(metafunc.definition.path).relative_to(_TESTS).as_posix()
    if path.startswith(_WITH_EACH):
        metafunc.fixturenames.append("engine")
        metafunc.parametrize("engine", NAMES, indirect=True)


@pytest.fixture
def engine(request, monkeypatch):
    """The name of the engine that computes calls on NumPy arrays, in child processes, too."""
    internals.use_engine(monkeypatch, request.param)
    yield request.param
    internals.forget_plans()
