"""Choose the threads of a call: PyTorch's OpenMP team, or the pool of this package.

In a process that has imported PyTorch, calls run on PyTorch's OpenMP team. After each operation of
PyTorch, the threads of this team stay awake for milliseconds. So the threads of another pool would
compete with the team for the processors. In other processes, calls run on the package's own pool
(`kernels.pool`), which exists only on Linux. Without a team or a pool, a call has one thread.

A forked child never enters the team of its parent, because the threads do not exist in the child
and libgomp would wait for them for ever. The package's own pool creates new threads in the child.
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

from backnorm_kernels import library
from backnorm_kernels.kinds import THREADS
from backnorm_kernels.slots import CELLS, CREATE, PARALLEL, THREAD_NUMBER

_TEAM = ("GOMP_parallel", "omp_get_thread_num")
_POOL = ("pthread_create", "pthread_detach", "pthread_sigmask")

_HAS_POOL: bool = sys.platform == "linux"


@dataclass(frozen=True, slots=True)
class Service:
    """Which threads run a call whose plan has more than one thread, and why.

    Attributes
    ----------
    name : {"team", "pool", "caller"}
        PyTorch's team; the package's own pool; the calling thread alone.
    reason : str
        The reason of the choice, as text.
    """

    name: str
    reason: str


@functools.cache
def runner() -> Callable[[int, int], int]:
    """Return the native function that runs the kernel of a record: see `kernels.team`.

    The first argument of the function is the address of the record. If the record has addresses of
    array objects, the second argument is the size of an object's header; otherwise it is 0. The
    function returns 1 if the call is complete, -1 - c if channel c has an invalid variance, or 0 if
    the time limit has passed and the function must be called again.

    Raises
    ------
    MachineCodeError
        If there is no library for this processor.
    """
    loaded = library.load(THREADS)
    # The addresses of the `pthread` functions are looked up at run time. The library is not linked
    # to these functions, because their symbol versions, and the files that contain them, differ
    # between C libraries.
    _data()[CREATE : CREATE + len(_POOL)] = _addresses(ctypes.CDLL(None), _POOL) or (0, 0, 0)
    # `bn_run` is the compiled function `_run` of kernels/team.py.
    run = loaded.bn_run
    # The two arguments are declared as pointers, not as int64. If a number has more than 32 bits,
    # ctypes takes 0.1 us less to convert it to a pointer than to an int64.
    run.argtypes, run.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int64
    return run


def region() -> int:
    """Return how many threads a parallel region of PyTorch's team has. Return 0 if the team is not
    used.

    Regions of backnorm always have as many threads as PyTorch's own regions. If a region had fewer
    threads, libgomp would end the threads of the team that the region does not use. PyTorch's next
    operator would then wait 4 ms until libgomp has started new threads.
    """
    torch = modules.get("torch")
    if torch is None or not (_found or not _why_not(torch)):
        return 0
    number: int = torch.get_num_threads()
    return number


def service() -> Service:
    """Return which threads run the calls of this thread, and the reason."""
    torch = modules.get("torch")
    why_not = "PyTorch is not imported" if torch is None else _why_not(torch)
    if not why_not:
        return Service("team", f"PyTorch is imported, and runs on {_team()[1]}")
    if _HAS_POOL:
        return Service("pool", why_not)
    return Service("caller", f"{why_not}; backnorm's own threads exist only on Linux")


def _why_not(torch: Any) -> str:
    """Return the reason why PyTorch's team is not used, or an empty string if it is used."""
    if _barred:
        return "this process was forked from one with PyTorch, whose threads it does not have"
    if not hasattr(torch, "get_num_threads"):
        return "PyTorch is being imported"
    found, where = _team()
    return "" if found else where


@functools.cache
def _team() -> tuple[bool, str]:
    """Find the functions of PyTorch's OpenMP runtime.

    Return two values: True and the file name of the runtime, or, if the functions were not found,
    False and the reason.
    """
    path = _mapped(lambda mapped: Path(mapped[-1]).name == "libtorch_cpu.so")
    if path is None:
        return False, "PyTorch has no libtorch_cpu.so here"
    own = _addresses(_loaded(path[-1]), _TEAM)
    if own is None:
        return False, "PyTorch has no OpenMP runtime with GOMP_parallel"
    # The two functions of the OpenMP runtime are searched for in the order in which the dynamic
    # linker resolves PyTorch's own calls of them. First, `_loaded(None)` has the symbols that are
    # global in the process; a library that was loaded before PyTorch may define these functions
    # there. Second come the symbols of PyTorch's own libraries (`own`).
    addresses = _addresses(_loaded(None), _TEAM) or own
    runner()
    data = _data()
    data[PARALLEL], data[THREAD_NUMBER] = addresses
    global _found
    _found = True
    file = _mapped(lambda mapped: _lies_in(addresses[0], mapped[0]))
    return True, file[-1] if file else "an OpenMP runtime"


def _loaded(place: str | None) -> ctypes.CDLL:
    """Return the loaded library at `place`; for None, the global symbols of the process."""
    return ctypes.CDLL(place, mode=os.RTLD_NOW | (os.RTLD_NOLOAD if place else 0))


def _addresses(loaded: ctypes.CDLL, names: tuple[str, ...]) -> list[int] | None:
    """Return the addresses of functions, or None if one of them is missing."""
    try:
        functions = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p) for name in names]
    except AttributeError:
        return None
    return [function.value or 0 for function in functions]


def _mapped(wanted: Callable[[list[str]], bool]) -> list[str] | None:
    """Return the fields of one line of /proc/self/maps, or None.

    The line is the first one whose fields `wanted` accepts. If there is no such line, return None.
    """
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
    """Return the 64-bit words (cells) of the thread library, which `slots` describes."""
    return (ctypes.c_int64 * CELLS).in_dll(library.load(THREADS), "bn_threads")


_barred = False

# Whether PyTorch's team (its OpenMP threads) was found and may be used. Once this flag is True, a
# call decides by this flag alone whether it can use the team.
_found = False


def _begin_anew() -> None:
    """In a forked child, forget the threads of the parent, which the child does not have."""
    global _barred, _found
    _barred, _found = _barred or "torch" in modules, False
    if runner.cache_info().currsize:
        known = _data()
        functions = known[CREATE : CREATE + len(_POOL)]
        ctypes.memset(known, 0, ctypes.sizeof(known))
        known[CREATE : CREATE + len(_POOL)] = functions


os.register_at_fork(after_in_child=_begin_anew)
