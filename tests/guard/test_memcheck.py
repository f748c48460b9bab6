"""Memcheck reports no error of the kernels, and one of a kernel that is wrong on purpose."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from backnorm_kernels import levels

PROGRAM = Path(__file__).with_name("memcheck.py")

pytestmark = [
    pytest.mark.sweep,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs Valgrind"),
    pytest.mark.skipif(not levels.is_x86(), reason="levels are of x86-64"),
]


def run(*arguments):
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, check=False
    )
    return done, json.loads(done.stdout.splitlines()[-1])


def test_memcheck_reports_no_errors_of_500_problems():
    make = [sys.executable, "-m", "backnorm_kernels.build.make", "--level", "x86-64"]
    subprocess.run(make, check=True)
    done, found = run("--count", "500")
    assert found == {"computed": 500, "errors": {}}
    assert done.returncode == 0, done.stderr


def test_memcheck_reports_kernel_that_reads_beyond_array():
    done, found = run("--wrong")
    assert done.returncode == 1
    (what,) = found["errors"]
    assert what.startswith("Invalid read of size 4 in float32_in_float64")
