"""The bits of every result, the same as those of the first engine, on processors of every level."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from backnorm_kernels import levels, library

_FOLDER = Path(__file__).parent / "bits"
_PROGRAM = "tests.engine.bits.compute"


def _run(*arguments, timeout=280, **environment):
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _compare(found):
    expected = json.loads((_FOLDER / "expected.json").read_text())
    assert found["inputs"] == expected["inputs"], "the inputs are others: nothing can be said"
    assert found["results"].keys() == expected["results"].keys()
    wrong = [name for name, bits in expected["results"].items() if found["results"][name] != bits]
    assert not wrong


@pytest.mark.long
@pytest.mark.skipif(not levels.is_x86(), reason="recorded on x86-64")
def test_operations_have_the_recorded_bits():
    _compare(json.loads(_run("-m", _PROGRAM)))


@pytest.mark.sweep
@pytest.mark.timeout(1700)
@pytest.mark.skipif(not levels.is_x86(), reason="recorded on x86-64")
@pytest.mark.parametrize("level", levels.LEVELS)
def test_operations_at_each_lower_level_have_the_recorded_bits(level):
    if level not in library.supported()[1:]:
        pytest.skip("not a level below that of this processor")
    _run("-m", "backnorm_kernels.build.make", "--level", level, timeout=800)
    _compare(json.loads(_run("-m", _PROGRAM, timeout=800, BACKNORM_CPU_LEVEL=level)))
