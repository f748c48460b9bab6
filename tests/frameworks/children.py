"""The checks of a framework, in a pytest of their own: no two frameworks share a process.

The checks are ``tests/frameworks/FRAMEWORK/check_*.py``. To run those of one framework alone::

    python -m pytest -o python_files='check_*.py' tests/frameworks/torch
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent

# Seconds for one file on a slow machine, kernels yet to be compiled.
LIMIT = 900


def files(framework):
    """Return the names of the files of checks."""
    found = sorted(path.name for path in (FOLDER / framework).glob("check_*.py"))
    assert found
    return found


def run(framework, file, module, *, sweep=False, **environment):
    """Run a file of checks; fail with its report. Without the framework, skip it or fail."""
    if importlib.util.find_spec(module) is None:
        message = f"{module} is not installed, so its adapter is not checked"
        if os.environ.get("CI") or os.environ.get("BACKNORM_REQUIRE_PEERS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    command = [sys.executable, "-m", "pytest", "-q", "-o", "python_files=check_*.py"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "sweep" if sweep else "not sweep"]
    done = subprocess.run(
        [*command, str(FOLDER / framework / file)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, **environment},
    )
    # Not every file has something for the sweep.
    none = sweep and done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    passed = done.returncode == 0 or none
    assert passed, done.stdout[-20_000:] + done.stderr[-5_000:]
