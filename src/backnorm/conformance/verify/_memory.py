"""The memory of calls: arrays between unreadable pages, and arrays with more elements than a 32-bit
index can count.

An access to an unreadable page ends the process. Some bytes lie between an array and these pages.
They have known values (canaries). If a call changes a canary, it has written outside of the array.
Around inputs, the canaries are bytes that are NaN when they are read as elements of any type.
Outputs have a different canary, because a kernel that reads beyond an input may copy the input's
canary to the bytes beyond an output. If both canaries were equal, these copied bytes would look
unchanged, and the write would not be detected.

All channels of a huge case, and their exact results, are copies of the channels and the exact
results of a small case.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from backnorm.conformance.battery import Case
from backnorm.conformance.verify.operations import RefusedError, operation_of

__all__ = ["Guarded", "available_bytes", "limited_memory", "repeated", "worst_parts"]

_LINE = 64
# A byte with all bits set. An element that consists of these bytes is NaN in every element type.
_NAN = 0xFF
_BEYOND_OUTPUT = 0xFD
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_GIB = 1 << 30
_MEMINFO = Path("/proc/meminfo")


class Guarded:
    """Memory of one array, with unreadable pages before and after it.

    Parameters
    ----------
    values : numpy.ndarray
        The contents of the array.
    fill : bool
        Whether to fill the array with NaN instead, as memory for an output.
    is_tight : bool
        Whether the array ends at the upper page. Then it is aligned only to its elements. Otherwise
        it begins at a cache line, and ends less than a cache line before the upper page.
    storage : str
        "fortran": the array is in Fortran order; "permuted": axis 1 is the last axis in memory;
        "strided": elements between the elements of the array do not belong to it; "misaligned":
        the array begins one element behind a cache line. Otherwise the array is in C order.

    Attributes
    ----------
    array : numpy.ndarray
    is_tight : bool
    place : tuple of int
        The address of the lower page, and that behind the upper page.
    """

    def __init__(
        self,
        values: np.ndarray,
        *,
        fill: bool = False,
        is_tight: bool = False,
        storage: str = "",
    ) -> None:
        self.is_tight = is_tight
        page = mmap.PAGESIZE
        shape, view = _stored(values.shape, storage)
        nbytes = math.prod(shape) * values.itemsize
        self._room = -(-max(nbytes + _LINE, 1) // page) * page
        self._memory = mmap.mmap(-1, self._room + 2 * page)
        whole = np.frombuffer(self._memory, np.uint8)
        self._bytes = whole[page : page + self._room]
        self._canary = _BEYOND_OUTPUT if fill else _NAN
        self._bytes[...] = self._canary
        start = self._room - nbytes
        if not is_tight:
            behind = values.itemsize if storage == "misaligned" else 0
            start -= (start - behind) % _LINE
        self._start, self._end = start, start + nbytes
        own = self._bytes[self._start : self._end]
        self.array: np.ndarray = view(own.view(values.dtype).reshape(shape))
        if fill:
            own[...] = _NAN
        else:
            self.array[...] = values
        base = whole.ctypes.data
        self.place = base, base + whole.size
        for address in (base, base + page + self._room):
            if _libc.mprotect(address, page, 0):
                raise OSError(ctypes.get_errno(), f"mprotect of {page} bytes")

    def holds_canaries(self) -> bool:
        """Whether the bytes around the array are unchanged."""
        around = self._bytes[: self._start], self._bytes[self._end :]
        return all(bool((part == self._canary).all()) for part in around)


def _stored(
    shape: tuple[int, ...], storage: str
) -> tuple[tuple[int, ...], Callable[[np.ndarray], np.ndarray]]:
    """Return the shape of an array's memory, and a function that returns the array in it."""
    if storage == "fortran":
        return shape[::-1], np.transpose
    if storage == "permuted" and len(shape) > 1:
        return (shape[0], *shape[2:], shape[1]), lambda memory: np.moveaxis(memory, -1, 1)
    if storage == "strided":
        return (*shape[:-1], 2 * shape[-1]), lambda memory: memory[..., ::2]
    return shape, lambda memory: memory


def available_bytes() -> int:
    """Return how many bytes of memory this process can use without making the system swap.

    On systems other than Linux, return the size of the machine's whole memory, used or not.
    """
    if not _MEMINFO.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    lines = _MEMINFO.read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) << 10


@contextlib.contextmanager
def limited_memory(case: Case, allowed: int) -> Iterator[None]:
    """Limit the data memory of this process to `allowed` bytes, so that the system does not swap.

    Raises
    ------
    RefusedError
        If the inputs and outputs of the case alone need more.
    """
    arrays = 3 if operation_of(case).name == "backward" else 2
    needed = arrays * case.repeats * case.data.x.nbytes
    if needed > allowed:
        raise RefusedError(
            f"the inputs and outputs take {needed / _GIB:.1f} GiB, of {allowed / _GIB:.1f} GiB "
            "that are available"
        )
    before = resource.getrlimit(resource.RLIMIT_DATA)
    hard = before[1]
    soft = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def repeated(case: Case) -> Case:
    """Return a case with `case.repeats` copies of the channels, one after the other.

    `case` must have the layout NCX, and the first axis of its x must have the size 1.
    """
    data, times = case.data, case.repeats

    def elements(array: np.ndarray) -> np.ndarray:
        large = np.empty((times, *array.shape[1:]), array.dtype)
        large[...] = array
        return large.reshape(1, -1, *array.shape[2:])

    x = elements(data.x)
    many = replace(
        data,
        x=x,
        dy=elements(data.dy) if operation_of(case).name == "backward" else x,
        mean=np.tile(data.mean, times),
        variance=np.tile(data.variance, times),
        gamma=np.tile(data.gamma, times),
        beta=np.tile(data.beta, times),
    )
    return replace(case, data=many, repeats=1)


def worst_parts(
    outputs: Mapping[str, np.ndarray | None], case: Case
) -> dict[str, np.ndarray | None]:
    """Return, for each output, the results of only one copy of the channels.

    An output has results for `case.repeats` copies of the same channels (see `repeated`). The copy
    is chosen whose results differ most from those of the first copy.
    """
    return {
        name: None if array is None else _worst_part(array, case.repeats)
        for name, array in outputs.items()
    }


def _worst_part(array: np.ndarray, times: int) -> np.ndarray:
    channels = array.shape[1] if array.ndim > 1 else array.size
    if channels % times:
        # An array of a wrong shape is returned as it is: the judge reports the shape.
        return array
    parts = array.reshape(times, -1)
    first, worst, most = parts[0], 0, 0.0
    bits = parts.view(np.uint8)
    for k in range(1, times):
        if np.array_equal(bits[k], bits[0]):
            continue
        with np.errstate(all="ignore"):
            gap = np.abs(parts[k].astype(np.float64) - first.astype(np.float64)).max()
        gap = np.inf if np.isnan(gap) else gap
        if gap > most:
            worst, most = k, gap
    shape = (1, channels // times, *array.shape[2:]) if array.ndim > 1 else (channels // times,)
    part: np.ndarray = parts[worst].reshape(shape)
    return part
