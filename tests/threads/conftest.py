"""Programs of their own processes: what is tested here may hang, or end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVERS = Path(__file__).parent / "drivers"


@pytest.fixture
def drive(heed_interrupts):
    """Run a program of `drivers`; return what it printed. It ends with 0, or the test fails."""

    def run(name, *arguments, timeout=280, **environment):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", str(DRIVERS / f"{name}.py"), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **environment},
            preexec_fn=heed_interrupts,
        )
        assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr[-2000:]}"
        return done.stdout

    return run
