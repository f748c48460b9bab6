"""Arrays between unreadable pages.

An access to an unreadable page ends the process. Some bytes lie between an array and these pages.
They have known values (canaries). If a call changes a canary, it has written outside of the array.
Around inputs, the canaries are bytes that are NaN when they are read as elements of any type.
Outputs have a different canary, because a kernel that reads beyond an input may copy the input's
canary to the bytes beyond an output. If both canaries were equal, these copied bytes would look
unchanged, and the write would not be detected.
"""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

_LINE = 64
# A byte with all bits set. An element that consists of these bytes is NaN in every element type.
_NAN = 0xFF
_BEYOND_OUTPUT = 0xFD
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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

    Attributes
    ----------
    array : numpy.ndarray
    is_tight : bool
    """

    def __init__(self, values: np.ndarray, *, fill: bool = False, is_tight: bool = False) -> None:
        self.is_tight = is_tight
        page = mmap.PAGESIZE
        self._room = -(-max(values.nbytes, 1) // page) * page
        self._memory = mmap.mmap(-1, self._room + 2 * page)
        whole = np.frombuffer(self._memory, np.uint8)
        self._bytes = whole[page : page + self._room]
        self._canary = _BEYOND_OUTPUT if fill else _NAN
        self._bytes[...] = self._canary
        start = self._room - values.nbytes
        if not is_tight:
            start -= start % _LINE
        self._start, self._end = start, start + values.nbytes
        own = self._bytes[self._start : self._end]
        self.array: np.ndarray = own.view(values.dtype).reshape(values.shape)
        if fill:
            own[...] = _NAN
        else:
            self.array[...] = values
        base = whole.ctypes.data
        for address in (base, base + page + self._room):
            if _libc.mprotect(address, page, 0):
                raise OSError(ctypes.get_errno(), f"mprotect of {page} bytes")

    def holds_canaries(self) -> bool:
        """Whether the bytes around the array are unchanged."""
        around = self._bytes[: self._start], self._bytes[self._end :]
        return all(bool((part == self._canary).all()) for part in around)
