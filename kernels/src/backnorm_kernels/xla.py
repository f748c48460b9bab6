"""Register kernels with the handler of XLA's custom calls: see `kernels.xla_handler`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterable
from typing import Any

from backnorm_kernels import library
from backnorm_kernels.kinds import LIBRARIES, XLA, Kind
from backnorm_kernels.xla_structures import ENVIRONMENT, ENVIRONMENT_CELLS

_MAJOR, _MINOR, _TASK, _KNOWN, _KERNELS = ENVIRONMENT
_CAPACITY = (ENVIRONMENT_CELLS - _KERNELS) // 2

_lock = threading.Lock()


def number_of(kind: Kind) -> int:
    """Return the number that identifies a kernel in XLA's calls, the same in every process."""
    digest = hashlib.sha256(kind.symbol.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def is_built() -> bool:
    """Whether the library of the handler is built."""
    return library.path_of(XLA) is not None


def register(kind: Kind) -> int:
    """Load a kernel and register it with the handler; return its number in XLA's calls."""
    _register([kind])
    return number_of(kind)


def register_built() -> None:
    """Register every kernel, so that functions compiled by other processes run in this one.

    In a checkout, kernels that are not built yet are skipped.
    """
    built = [entry for entry in LIBRARIES.values() if library.path_of(entry.name)]
    _register(kind for entry in built for kind in entry.kinds)


def _register(kinds: Iterable[Kind]) -> None:
    # Libraries are loaded before the lock is taken: loading may build them, and no other thread
    # should wait for that.
    found = {number_of(kind): library.address(kind) for kind in kinds}
    environment = _environment()
    with _lock:
        known = environment[_KNOWN]
        names = set(environment[_KERNELS : _KERNELS + 2 * known : 2])
        for name, address in found.items():
            if name in names:
                continue
            if known == _CAPACITY:
                raise RuntimeError(f"more than {_CAPACITY} kernels")
            at = _KERNELS + 2 * known
            environment[at : at + 2] = [name, address]
            known += 1
            # The count is written last, so that a handler in another thread sees only complete
            # entries.
            environment[_KNOWN] = known


def handler(major: int, minor: int) -> Any:
    """Return the handler, a C function, for version `major`.`minor` of XLA's interface."""
    environment, loaded = _environment(), library.load(XLA)
    with _lock:
        task = ctypes.cast(loaded.bn_xla_task, ctypes.c_void_p).value
        environment[_MAJOR], environment[_MINOR], environment[_TASK] = major, minor, task
    return loaded.bn_xla_handler


def _environment() -> Any:
    cells = ctypes.c_int64 * ENVIRONMENT_CELLS
    return cells.in_dll(library.load(XLA), "bn_environment")


def _renew() -> None:
    """Replace the lock in a forked child, where the thread that held it does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)
