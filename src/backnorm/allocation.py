"""New arrays whose pages are cheap: memory of arrays that are gone is used again.

A large new array costs as much as computing what is written to it: the system must find, clear
and map its pages (160 MB: 8 ms, and the gradient itself 13). So large arrays are blocks of memory
of our own, in huge pages, and when one is gone its block is kept for the next array of its size.

It is kept from nobody: when it has not been used for a moment, the block is marked free
(MADV_FREE), so that the system may take its pages at any time, without writing them anywhere, and
does so before it runs out of memory. Until then the process seems larger than it is (``LazyFree``
in /proc/PID/smaps). Not at once, because marking interrupts all processors: 0.1 to 0.3 ms on a
virtual machine. Small arrays, and systems without such a mark, are left to NumPy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time

import numpy as np

__all__ = ["LARGE", "allocate"]

# Blocks are whole huge pages. The C library uses freed memory of up to 32 MiB again too, but may
# have given it back to the system: an output of 3 MB then took 0.9 ms instead of 0.2.
_PAGE = LARGE = 2 << 20

# Blocks that are kept, and their bytes together: address space and page tables, not memory.
_MOST_BLOCKS = 64
_MOST_BYTES = 4 << 30

_CAN_MARK = sys.platform == "linux" and all(
    hasattr(mmap, name) for name in ("MADV_FREE", "MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS")
)


class _Block:
    """Memory of our own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.marked = False
        self.since = 0.0
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a system without huge pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        # The mapping ends with the block.
        self.address = np.frombuffer(self.memory, np.uint8).ctypes.data


class _Lease:
    """What an array in a block is based on: when the array is gone, so is this."""

    def __init__(self, block: _Block, size: int) -> None:
        self._block = block
        self.__array_interface__ = {
            "data": (block.address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

    def __del__(self) -> None:
        _give_back(self._block)


# Seconds until a block that nobody uses is marked.
_MOMENT = 0.1

# The oldest come first. Reentrant, because a lease can end wherever memory is allocated.
_lock = threading.RLock()
_spare: list[_Block] = []
_marker: threading.Thread | None = None


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new C-contiguous array with undefined contents.

    Raises
    ------
    MemoryError
    """
    # Costs nothing until it is written to.
    array = np.empty(shape, dtype)
    size = array.nbytes
    if size < LARGE or not _CAN_MARK:
        return array
    block = _take(-(-size // _PAGE) * _PAGE)
    if block is None:
        return array
    return np.asarray(_Lease(block, size)).view(dtype).reshape(shape)


def _take(size: int) -> _Block | None:
    """Return a block of `size` bytes, or None if the system has no more."""
    with _lock:
        for i in range(len(_spare) - 1, -1, -1):
            if _spare[i].size == size:
                return _spare.pop(i)
    try:
        return _Block(size)
    except (OSError, ValueError):
        _spare.clear()
        return None


def _give_back(block: _Block) -> None:
    global _marker
    if sys.is_finalizing():
        return
    block.since = time.monotonic()
    block.marked = False
    with _lock:
        _spare.append(block)
        while len(_spare) > _MOST_BLOCKS or sum(spare.size for spare in _spare) > _MOST_BYTES:
            _spare.pop(0)
        if _marker is None:
            _marker = threading.Thread(target=_mark, name="backnorm-memory", daemon=True)
            _marker.start()


def _mark() -> None:
    """Mark blocks that have not been used for a moment, until all are marked."""
    global _marker
    while True:
        time.sleep(_MOMENT)
        with _lock:
            waiting = [block for block in _spare if not block.marked]
            if not waiting:
                _marker = None
                return
            for block in waiting:
                if time.monotonic() - block.since >= _MOMENT:
                    _mark_one(block)


def _mark_one(block: _Block) -> None:
    try:
        block.memory.madvise(mmap.MADV_FREE)
        block.marked = True
    except (OSError, ValueError):  # not with this kind of memory: it ends here
        _spare.remove(block)


def _forget() -> None:
    """Begin anew in a forked child, where the other threads are not."""
    global _lock, _marker
    _lock, _marker = threading.RLock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
