"""Tests that run with each engine, so that each engine checks the other one.

If the kernels are not installed, these tests run with NumPy alone, and the tests of the kernels are
not collected.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backnorm import engines
from tests.support import internals

_TESTS = Path(__file__).parents[1]

# The tests of the operator's front doors, and of what calls them. What the command reads, refuses
# and writes does not depend on the engine.
_COMMANDS = ("benchdnn", "demo", "examples", "random_tensors", "run")
_WITH_EACH = ("operator", "dialects", "refusals/test_operators", "graph")
_WITH_EACH += tuple(f"cli/test_{name}.py" for name in _COMMANDS)

# The tests of the kernels, and of the adapters that need kernels.
_OF_KERNELS = ("engine", "threads", "guard", "frameworks")

NAMES = ("kernels", "numpy") if engines.are_kernels_installed() else ("numpy",)


def pytest_report_header():
    """Say which tests are left out."""
    if "kernels" in NAMES:
        return []
    folders = ", ".join(f"tests/{name}" for name in _OF_KERNELS)
    return [f"backnorm-kernels is not installed: NumPy computes, without {folders}"]


def pytest_ignore_collect(collection_path):
    """Leave out the tests of the kernels if they are not installed."""
    of_kernels = [_TESTS / name for name in _OF_KERNELS]
    return (collection_path in of_kernels and "kernels" not in NAMES) or None


def pytest_generate_tests(metafunc):
    path = Path(metafunc.definition.path).relative_to(_TESTS).as_posix()
    if path.startswith(_WITH_EACH):
        metafunc.parametrize("engine", NAMES, indirect=True)


@pytest.fixture(autouse=True)
def engine(request, monkeypatch):
    """The engine of calls on NumPy arrays, also in child processes; None: the default."""
    if not hasattr(request, "param"):
        yield None
        return
    internals.use_engine(monkeypatch, request.param)
    yield request.param
    internals.forget_plans()


@pytest.fixture(scope="session")
def without_kernels():
    """Run code in a process in which backnorm-kernels is not installed, and return the process."""

    def run(code, **environment):
        own = {name: value for name, value in os.environ.items() if name != "BACKNORM_ENGINE"}
        # The import system takes a module that is None for one that does not exist.
        hidden = "import sys\nsys.modules['backnorm_kernels'] = None\n"
        return subprocess.run(
            [sys.executable, "-c", hidden + code], env=own | environment,
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip

    return run
