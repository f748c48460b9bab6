"""A library that is missing in a checkout is built when it is needed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from backnorm.cpu.build.sources import digest
from backnorm.cpu.kinds import PROBE
from backnorm.cpu.levels import LEVELS
from backnorm.errors import MachineCodeError

__all__ = ["build", "command", "environment", "place"]


def place(name: str, level: str, folder: Path) -> Path:
    """Return where a library of the sources as they are is put, in a folder of levels."""
    return folder / level / f"{name}-{digest(name)}.so"


def command(level: str, folder: Path, *names: str) -> list[str]:
    """Return the command that builds libraries of a level in a folder of levels."""
    here = "backnorm.cpu.build.compile"
    return [sys.executable, "-m", here, level, str(folder / level), *names]


def environment(level: str) -> dict[str, str]:
    """Return the environment of that command."""
    numba = {}
    if level in LEVELS:
        features = [f"+{name}" for name in LEVELS[level].features]
        numba["NUMBA_CPU_NAME"] = LEVELS[level].processor
        # Never empty: that would stand for those of this processor.
        numba["NUMBA_CPU_FEATURES"] = ",".join(features) or "+sse2"
    # The sources that are running, and the same order of everything in every process.
    source = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **numba, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def build(name: str, level: str, folder: Path) -> None:
    """Build a library, with one line on the screen if it takes long.

    Raises
    ------
    MachineCodeError
        If Numba is not installed, or the build failed.
    """
    if importlib.util.find_spec("numba") is None:
        raise MachineCodeError(
            f"the machine code {name}, {level}, is not built in this checkout, and Numba, which "
            "compiles it, is not installed: pip install --group kernels, and then make kernels"
        )
    # What asks the processor is there at once.
    if name != PROBE:
        _say(f"backnorm: compiling {name} for {level} (make kernels compiles all)")
    done = subprocess.run(  # noqa: S603 (this interpreter, our own module)
        command(level, folder, name),
        env=environment(level),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise MachineCodeError(f"compiling {name} for {level} failed: {said[-1]}")
    if not place(name, level, folder).exists():
        raise MachineCodeError(
            f"the sources of {name} are others than when this process began; start it again"
        )


def _say(line: str) -> None:
    """Write a line to where stderr went when Python started, if that is open.

    Not with `print`: a process that is forked while another thread prints has a stderr whose lock
    nobody gives back, and waits for ever when it prints, too.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.__stderr__.fileno(), f"{line}\n".encode())  # type: ignore[union-attr]
