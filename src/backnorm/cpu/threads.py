"""Which threads take part in a call: those of PyTorch's own team, or ours.

Beside PyTorch its OpenMP team serves: after each operation its threads stay awake for
milliseconds, and threads of ours would compete with them for the processors. Everywhere else there
is a pool of our own (`kernels.pool`), Linux's alone; where it is not, a call has one thread.

A forked child never enters the team of its parent: the threads are not there, and libgomp waits for
them for ever. Our pool starts again in it.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from sys import modules
from typing import Any

from backnorm.cpu import library
from backnorm.cpu.kinds import THREADS
from backnorm.cpu.slots import CELLS, CREATE, PARALLEL, THREAD_NUMBER

__all__ = ["Service", "region", "runner", "service"]

_TEAM = ("GOMP_parallel", "omp_get_thread_num")
_POOL = ("pthread_create", "pthread_detach", "pthread_sigmask")

_HAS_POOL: bool = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Service:
    """Who takes part in a call that has more than one thread.

    Attributes
    ----------
    name : {"team", "pool", "caller"}
        PyTorch's team; our pool; the caller alone.
    reason : str
        Why, for people.
    """

    name: str
    reason: str


@functools.cache
def runner() -> Callable[[int, int], int]:
    """Return the function that runs the kernel of a record, by its address: see `kernels.team`.

    The second argument is 0, or the size of the header of the objects that the record names. It
    returns 1, or -1 - c if channel c was refused, or 0 if the time of the call is up, and it is
    to be called again.

    Raises
    ------
    MachineCodeError
        If there is no library for this processor.
    """
    loaded = library.load(THREADS)
    # Not linked: C libraries have them in other versions, and in other places.
    _data()[CREATE : CREATE + len(_POOL)] = _addresses(ctypes.CDLL(None), _POOL) or (0, 0, 0)
    run = loaded.bn_run
    # Of a number that is more than 32 bits, a pointer is made in 0.1 us less than an int64.
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int64
    return run


def region() -> int:
    """Return how many threads a region of PyTorch's team has; 0 if the team does not serve here.

    Always as many as PyTorch's own have: a smaller one makes libgomp end threads, and the next of
    PyTorch's operators waits 4 ms until they are started again.
    """
    torch = modules.get("torch")
    if torch is None or not (_found or not _why_not(torch)):
        return 0
    number: int = torch.get_num_threads()
    return number


def service() -> Service:
    """Return who takes part in the calls of this thread, and why."""
    torch = modules.get("torch")
    why_not = "PyTorch is not imported" if torch is None else _why_not(torch)
    if not why_not:
        return Service("team", f"PyTorch is imported, and runs on {_team()[1]}")
    if _HAS_POOL:
        return Service("pool", why_not)
    return Service("caller", f"{why_not}; threads of our own are for Linux alone")


def _why_not(torch: Any) -> str:
    """Return why the team of a PyTorch that is imported does not serve, or nothing if it does."""
    if _barred:
        return "this process was forked from one with PyTorch, whose team is not in it"
    if not hasattr(torch, "get_num_threads"):
        return "PyTorch is being imported"
    found, where = _team()
    return "" if found else where


@functools.cache
def _team() -> tuple[bool, str]:
    """Find the functions of PyTorch's OpenMP runtime; return whether, and the file or why not."""
    path = _mapped(lambda mapped: Path(mapped[-1]).name == "libtorch_cpu.so")
    if path is None:
        return False, "PyTorch has no libtorch_cpu.so here"
    own = _addresses(_loaded(path[-1]), _TEAM)
    if own is None:
        return False, "PyTorch has no OpenMP runtime with GOMP_parallel"
    # As the linker looked for what PyTorch calls: first in what the whole process sees, which may
    # have been loaded before; then in PyTorch's own libraries.
    addresses = _addresses(_loaded(None), _TEAM) or own
    runner()
    data = _data()
    data[PARALLEL], data[THREAD_NUMBER] = addresses
    global _found
    _found = True
    file = _mapped(lambda mapped: _lies_in(addresses[0], mapped[0]))
    return True, file[-1] if file else "an OpenMP runtime"


def _loaded(place: str | None) -> ctypes.CDLL:
    """Return a library that is loaded already; None: all that the process sees."""
    return ctypes.CDLL(place, mode=os.RTLD_NOW | (os.RTLD_NOLOAD if place else 0))


def _addresses(loaded: ctypes.CDLL, names: tuple[str, ...]) -> list[int] | None:
    """Return the addresses of functions, or None if not all are there."""
    try:
        functions = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names]
    except AttributeError:
        return None
    return [function.value or 0 for function in functions]


def _mapped(wanted: Callable[[list[str]], bool]) -> list[str] | None:
    """Return the fields of the first file in memory that is wanted: addresses, ..., path."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            fields = (line.rstrip("\n").split(maxsplit=5) for line in lines)
            return next((found for found in fields if len(found) == 6 and wanted(found)), None)
    except OSError:
        return None


def _lies_in(address: int, span: str) -> bool:
    first, end = (int(text, 16) for text in span.split("-"))
    return first <= address < end


def _data() -> Any:
    """Return the library's cells: see `slots`."""
    return (ctypes.c_int64 * CELLS).in_dll(library.load(THREADS), "bn_threads")


_barred = False

# What a repeated call looks at: whether the team was found, and is not barred.
_found = False


def _begin_anew() -> None:
    """Forget, in a forked child, the threads that are not in it."""
    global _barred, _found
    _barred, _found = _barred or "torch" in modules, False
    if runner.cache_info().currsize:
        known = _data()
        functions = known[CREATE : CREATE + len(_POOL)]
        ctypes.memset(known, 0, ctypes.sizeof(known))
        known[CREATE : CREATE + len(_POOL)] = functions


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
