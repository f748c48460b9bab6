"""Find and load the libraries of machine code, and return their functions.

An installed package has all libraries in ``lib/<level>`` and cannot build others. In a checkout of
the sources, the name of a library contains the digest of the sources from which the library was
built. A library that is missing, or that was built from other sources, is built when it is first
needed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from pathlib import Path

from backnorm import config
from backnorm.errors import ArgumentValueError, MachineCodeError
from backnorm_kernels import levels
from backnorm_kernels.kinds import OF_ALL, PROBE, Kind
from backnorm_kernels.levels import FOLDER, HOST, LEVELS, is_x86, probed
from backnorm_kernels.record import LAYOUT
from backnorm_kernels.seal import is_whole

_FROM_SOURCES = (Path(__file__).parent / "build").is_dir()
_REMEDY = "rebuild it with `make kernels`" if _FROM_SOURCES else "reinstall backnorm-kernels"

# While a thread holds the lock, Python may run a finaliser (such as `__del__`) in this thread, and
# the finaliser may have to load another library. Therefore the lock is reentrant.
_building = threading.RLock()
_loaded: dict[str, ctypes.CDLL] = {}


@functools.cache
def supported() -> tuple[str, ...]:
    """Return the levels that this processor supports, the best first."""
    return probed(load(PROBE)) if is_x86() else (HOST,)


@functools.cache
def level() -> str:
    """Return the level whose libraries are used: BACKNORM_CPU_LEVEL if it is set, else the best.

    Raises
    ------
    ArgumentValueError
        If BACKNORM_CPU_LEVEL names a level that this processor does not support.
    """
    wanted = config.cpu_level()
    if wanted is None:
        return supported()[0]
    if wanted not in supported():
        known = "this processor does not have" if wanted in LEVELS else "does not exist"
        raise ArgumentValueError(
            "BACKNORM_CPU_LEVEL",
            f"environment variable names a level that {known}",
            came=repr(wanted),
            accepted=", ".join(supported()),
        )
    return wanted


def address(kind: Kind) -> int:
    """Return the address of the compiled function for kernels of the kind `kind`.

    The function's arguments are the address of a record, and the index of a participant.

    Raises
    ------
    MachineCodeError
        If there is no library for this processor.
    """
    return ctypes.cast(load(kind.library)[kind.symbol], ctypes.c_void_p).value or 0


def load(name: str) -> ctypes.CDLL:
    """Load a library and return it; in a checkout, build it first if necessary.

    Raises
    ------
    MachineCodeError
        If the library does not exist for this processor, or is damaged.
    """
    found = _loaded.get(name)
    if found is not None:
        return found
    path = path_of(name) or _built(name)
    try:
        if not is_whole(path):
            raise OSError("it is damaged")
        found = ctypes.CDLL(str(path))
        layout = ctypes.c_int64.in_dll(found, "bn_layout").value
    except (OSError, ValueError) as error:
        raise MachineCodeError(f"{path} cannot be used: {error}; {_REMEDY}") from error
    if layout != LAYOUT:
        raise MachineCodeError(f"{path} is of another version of backnorm-kernels; {_REMEDY}")
    return _loaded.setdefault(name, found)


def path_of(name: str) -> Path | None:
    """Return the path of a library's best existing build, or None if this processor can use none.

    In a checkout, only the build for the best level counts. If it does not exist, the result is
    None even if there is a build for a lower level, because `load` can build the missing one.
    """
    if _FROM_SOURCES:
        from backnorm_kernels.build.demand import file_of

        path = file_of(name, levels_of(name)[0], FOLDER)
        return path if path.exists() else None
    found = (_installed(level).get(name) for level in levels_of(name))
    return next(filter(None, found), None)


def digest(name: str) -> str:
    """Return the digest of the sources of a library."""
    if _FROM_SOURCES:
        from backnorm_kernels.build.sources import digest as of_sources

        return of_sources(name)
    path = path_of(name)
    return path.stem.rpartition("-")[2] if path else ""


def levels_of(name: str) -> tuple[str, ...]:
    """Return the levels that this processor supports and that have the library, the best first."""
    # The level is not asked for if all processors share the library, because the probe, which
    # detects the level, is such a library.
    return levels.levels_of(name, "" if name in OF_ALL else level())


@functools.cache
def _installed(found: str) -> dict[str, Path]:
    """Return the paths of an installed package's libraries for the level `found`.

    The keys of the result are the names of the libraries.
    """
    return {path.stem.rpartition("-")[0]: path for path in (FOLDER / found).glob("*.so")}


def _built(name: str) -> Path:
    """Build a library for this processor's level and return its path."""
    if not _FROM_SOURCES:
        have = ", ".join(sorted(path.parent.name for path in FOLDER.glob(f"*/{name}-*"))) or "none"
        raise MachineCodeError(
            f"this package of backnorm-kernels has no machine code for this processor (level "
            f"{' or '.join(levels_of(name))}; found: {have}); install the sources on this machine "
            "(pip install --no-cache-dir ./kernels), or a package built with "
            "BACKNORM_BUILD_LEVELS=all"
        )
    from backnorm_kernels.build.demand import BuildError, build

    # Only one thread of a process builds libraries at a time. Several processes may build the same
    # library at the same time.
    with _building:
        path = path_of(name)
        if path is None:
            try:
                build(name, levels_of(name)[0], FOLDER)
            except BuildError as error:
                raise MachineCodeError(str(error)) from error
            path = path_of(name)
    assert path is not None
    return path


def _renew() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _building
    _building = threading.RLock()


os.register_at_fork(after_in_child=_renew)
