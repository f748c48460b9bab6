"""When a library is first needed, build it if the checkout lacks it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from backnorm_kernels.build.sources import digest
from backnorm_kernels.kinds import PROBE
from backnorm_kernels.levels import FOLDER, HOST, LEVELS, is_x86, probed
from backnorm_kernels.seal import is_whole


class BuildError(RuntimeError):
    """A library could not be built; the message says why."""


def file_of(name: str, level: str, folder: Path) -> Path:
    """Return the path in `folder` of the library `name`, built for the processors of `level`.

    The file's name contains a digest of the current sources, so that a library of older sources has
    another path.
    """
    return folder / level / f"{name}-{digest(name)}.so"


def command(level: str, folder: Path, *names: str) -> list[str]:
    """Return the command that builds libraries of a level."""
    here = "backnorm_kernels.build.compile"
    return [sys.executable, "-m", here, level, str(folder / level), *names]


def environment(level: str) -> dict[str, str]:
    """Return the environment variables of the command that builds libraries of a level."""
    numba = {}
    if level in LEVELS:
        features = [f"+{name}" for name in LEVELS[level].features]
        numba["NUMBA_CPU_NAME"] = LEVELS[level].processor
        # Numba would read an empty string as the features of this processor.
        numba["NUMBA_CPU_FEATURES"] = ",".join(features) or "+sse2"
    # With PYTHONPATH, the process that compiles imports this package from the same sources as
    # this process. With a fixed PYTHONHASHSEED, every process that compiles iterates over sets of
    # strings in the same order.
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return {**os.environ, **numba, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}


def build(name: str, level: str, folder: Path) -> None:
    """Build a library. Before the build, write a line to stderr, unless the library is the probe.

    Raises
    ------
    BuildError
        If Numba is not installed, or the build failed.
    """
    if importlib.util.find_spec("numba") is None:
        raise BuildError(
            f"the machine code {name}, {level}, is not built in this checkout, and Numba, which "
            "compiles it, is not installed: pip install --group kernels, and then make kernels"
        )
    # The probe, the library that detects the processor's level, is built too quickly for a message.
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
        said = done.stderr.strip().splitlines() or ["no message on stderr"]
        raise BuildError(f"compiling {name} for {level} failed: {said[-1]}")
    if not file_of(name, level, folder).exists():
        raise BuildError(f"the sources of {name} have changed since this process began; restart it")


def _say(line: str) -> None:
    """Write a line to the original stderr of the process, if that is open.

    `_say` does not call `print`, because `print` takes the lock of stderr. If the process was
    forked while another thread held that lock, it is never released in the child, and `print` would
    wait for ever.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        os.write(sys.__stderr__.fileno(), f"{line}\n".encode())  # type: ignore[union-attr]


def levels_here() -> tuple[str, ...]:
    """Return the levels that this processor supports, the best first; the probe is built first."""
    if not is_x86():
        return (HOST,)
    path = file_of(PROBE, "x86-64", FOLDER)
    if not is_whole(path):
        build(PROBE, "x86-64", FOLDER)
    return probed(ctypes.CDLL(str(path)))
