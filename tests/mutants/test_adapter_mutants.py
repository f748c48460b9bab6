"""The tests of `make test` reject every adapter and every rule that is broken on purpose."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import backnorm

from . import adapters, rules

MUTANTS = (*adapters.MUTANTS, *rules.MUTANTS)
ROOT = Path(__file__).parents[2]
SOURCES = Path(backnorm.__file__).parent
BY_NAME = pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)


def broken(mutant, folder):
    """Write a copy of the package with the wrong step."""
    package = folder / "backnorm"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    file = package / mutant.file
    file.write_text(file.read_text().replace(mutant.text, mutant.replacement))


@BY_NAME
def test_mutant_replaces_one_place_of_the_source(mutant):
    source = (SOURCES / mutant.file).read_text()
    assert source.count(mutant.text) == 1
    assert all((ROOT / file).exists() for file in mutant.tests)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@BY_NAME
def test_mutant_fails_the_tests_of_its_part(mutant, tmp_path):
    broken(mutant, tmp_path)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT), *sys.path]),
        # No test of the mutants within one.
        "PYTEST_ADDOPTS": "",
    }
    if mutant.backend:
        environment["KERAS_BACKEND"] = mutant.backend
    options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider"]
    tier = ["-m", "not long and not sweep"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tier, *mutant.tests],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    # 1: tests failed. Others are errors of collection or of the run.
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    # ERROR: the fixture failed that computes what several tests compare, in several processes.
    failed = re.findall("^(?:FAILED|ERROR) .*::.*", done.stdout, re.MULTILINE)
    print(mutant.name, "|", failed)
    assert failed, done.stdout[-3000:]
