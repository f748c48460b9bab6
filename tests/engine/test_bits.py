"""The bits of every result, the same as those of the first engine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent / "bits"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="recorded on x86-64")
def test_every_operation_gives_the_bits_that_it_always_gave():
    done = subprocess.run(
        [sys.executable, str(_FOLDER / "compute.py")],
        capture_output=True,
        text=True,
        timeout=280,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = json.loads((_FOLDER / "expected.json").read_text())
    assert found["inputs"] == expected["inputs"], "the inputs are others: nothing can be said"
    assert found["results"].keys() == expected["results"].keys()
    wrong = [
        name for name, digest in expected["results"].items() if found["results"][name] != digest
    ]
    assert not wrong
