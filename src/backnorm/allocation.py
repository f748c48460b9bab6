"""New arrays whose pages are cheap: memory of arrays that are gone is used again.

A large new array costs as much as computing what is written to it: the system must find, clear
and map its pages (160 MB: 8 ms, and the gradient itself 13). So large arrays are blocks of memory
of our own, in huge pages, and when one is gone its block is kept for the next array of its size.

It is kept from nobody: the block is marked free (MADV_FREE), so that the system may take its pages
at any time, without writing them anywhere, and does so before it runs out of memory. Until then
the process seems larger than it is (``LazyFree`` in /proc/PID/smaps). Small arrays, and systems
without such a mark, are left to NumPy.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

import numpy as np

__all__ = ["allocate"]

# The C library uses freed memory of up to 32 MiB again itself, which costs less than marking it.
_LARGE = 32 << 20

# Blocks are whole huge pages.
_PAGE = 2 << 20

# Blocks that are kept, and their bytes together: address space and page tables, not memory.
_MOST_BLOCKS = 16
_MOST_BYTES = 4 << 30

_CAN_MARK = sys.platform == "linux" and all(
    hasattr(mmap, name) for name in ("MADV_FREE", "MADV_HUGEPAGE", "MAP_PRIVATE", "MAP_ANONYMOUS")
)


class _Block:
    """Memory of our own."""

    def __init__(self, size: int) -> None:
        self.size = size
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


# Changed by single operations of a list, which need no lock. The oldest come first.
_spare: list[_Block] = []


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new C-contiguous array with undefined contents.

    Raises
    ------
    MemoryError
    """
    # Costs nothing until it is written to.
    array = np.empty(shape, dtype)
    size = array.nbytes
    if size < _LARGE or not _CAN_MARK:
        return array
    block = _take(-(-size // _PAGE) * _PAGE)
    if block is None:
        return array
    return np.asarray(_Lease(block, size)).view(dtype).reshape(shape)


def _take(size: int) -> _Block | None:
    """Return a block of `size` bytes, or None if the system has no more."""
    for block in reversed(_spare):
        if block.size == size:
            with contextlib.suppress(ValueError):  # another thread was quicker
                _spare.remove(block)
                return block
    try:
        return _Block(size)
    except (OSError, ValueError):
        _spare.clear()
        return None


def _give_back(block: _Block) -> None:
    if sys.is_finalizing():
        return
    try:
        block.memory.madvise(mmap.MADV_FREE)
    except (OSError, ValueError):  # not this kind of memory: it ends here
        return
    _spare.append(block)
    while len(_spare) > _MOST_BLOCKS or sum(spare.size for spare in [*_spare]) > _MOST_BYTES:
        try:
            _spare.pop(0)
        except IndexError:
            return
