"""The handler of XLA's custom calls, in this process: see `kernels.xla_handler`."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Iterable
from typing import Any

from backnorm.cpu import library
from backnorm.cpu.kinds import FLOOR, LIBRARIES, XLA, Kind
from backnorm.cpu.xla_structures import ENVIRONMENT, ENVIRONMENT_CELLS

__all__ = ["handler", "introduce", "introduce_built", "number_of"]

_MAJOR, _MINOR, _TASK, _KNOWN, _TABLE = ENVIRONMENT
_CAPACITY = (ENVIRONMENT_CELLS - _TABLE) // 2

_lock = threading.Lock()


def number_of(kind: Kind) -> int:
    """Return the number that calls name a kernel by, the same in every process."""
    digest = hashlib.sha256(kind.symbol.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def introduce(kind: Kind) -> int:
    """Let calls mean a kernel, which is loaded; return the number that they name it by."""
    _introduce([kind])
    return number_of(kind)


def introduce_built() -> None:
    """Let calls mean every kernel that is there, so that compiled functions of other processes run.

    In a checkout those that are not built yet are left out.
    """
    every = [entry for entry in LIBRARIES.values() if entry.name != FLOOR]
    _introduce(kind for entry in every if library.path_of(entry.name) for kind in entry.kinds)


def _introduce(kinds: Iterable[Kind]) -> None:
    # Before the lock is taken: what is loaded may have to be built.
    found = {number_of(kind): library.address(kind) for kind in kinds}
    environment = _environment()
    with _lock:
        known = environment[_KNOWN]
        names = set(environment[_TABLE : _TABLE + 2 * known : 2])
        for name, address in found.items():
            if name in names:
                continue
            if known == _CAPACITY:
                raise RuntimeError(f"more than {_CAPACITY} kernels")
            at = _TABLE + 2 * known
            environment[at : at + 2] = [name, address]
            known += 1
            # Last: a handler that is at work sees what is complete.
            environment[_KNOWN] = known


def handler(major: int, minor: int) -> Any:
    """Return the handler, a function of C, for the version of the interface in XLA's header."""
    environment, loaded = _environment(), library.load(XLA)
    with _lock:
        task = ctypes.cast(loaded.bn_xla_task, ctypes.c_void_p).value
        environment[_MAJOR], environment[_MINOR], environment[_TASK] = major, minor, task
    return loaded.bn_xla_handler


def _environment() -> Any:
    cells = ctypes.c_int64 * ENVIRONMENT_CELLS
    return cells.in_dll(library.load(XLA), "bn_environment")


def _renew() -> None:
    """Begin anew in a forked child, where a thread that held the lock is not."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)
