"""Allocate outputs, reusing the memory of freed outputs.

Allocating a large array costs as much time as computing its contents: the system must find, clear
and map its pages. Therefore this module maps outputs of 2 to 192 MiB itself, as blocks of huge
pages. When such an output is freed, its block is kept for the next output of that size. NumPy
allocates all other outputs, and every output on systems other than Linux.

Memory returns to the system as follows:

- Two groups of freed blocks are kept: the last 12 blocks of up to 16 MiB, and the last 3 larger
  blocks (together never more than 768 MiB). If a group is full and one more of its blocks is freed,
  the oldest block of the group is unmapped.
- The next allocation of an output of 2 to 192 MiB reuses a kept block of its size, and unmaps every
  other kept block whose last array was allocated more than a second ago. Between two such
  allocations, kept blocks stay mapped however old they are, because no code runs that could unmap
  them.

An array may be freed at any point of any thread, during a garbage collection, and at interpreter
shutdown. Freeing an array therefore takes no lock, starts no thread and runs no Python code. All
that it does is append to a bounded deque, which is an atomic operation.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
import time
import weakref
from collections import deque

import numpy as np

from backnorm.addresses import address_of

#: Bytes of a cache line, and of the widest vectors.
ALIGNMENT = 64

# A block consists of whole huge pages. The times below are those of one thread that wrote an output
# once (Intel Xeon, family 6 model 167, 2 virtual processors).
#
# For outputs of up to 32 MiB, the C library reuses freed memory, and this is as fast as reusing a
# block. But the C library returns free memory at the end of its heap to the system. Therefore three
# outputs of 3.5 MB that had been freed together took 1.0 ms each (in blocks 0.26 ms), and three of
# 16 MB took 3.5 ms each (in blocks 1.2 ms).
_PAGE = LARGE = 2 << 20

# Above 32 MiB, NumPy gets new memory from the system for every array, in huge pages like a block.
# To write an output of 64 MB took 15 ms in memory from NumPy, and 8.6 ms in a reused block. To
# write an output of 160 MB took 37 ms in memory from NumPy, and 20 ms in a reused block. An output
# of 512 MB would gain as much from a block (61 ms instead of 113 ms), but kept blocks of that size
# would use too much memory.
_LARGEST = 192 << 20

# The module keeps at most `_MOST_SMALL` free blocks of up to `_SMALL` bytes, and `_MOST_OTHERS`
# larger ones. If no block has been kept for it, a small output takes longer in a new block than in
# an array that NumPy allocates: NumPy takes the memory from the C library's heap, which is written
# faster than a new block. Writing eight outputs of 2 to 28 MB, one after the other, took 17 ms if
# three blocks were kept, and 10 ms if twelve blocks were kept. It took 8 ms in memory that NumPy
# allocated.
_SMALL = 16 << 20
_MOST_SMALL, _MOST_OTHERS = 12, 3

# Seconds after which a freed block may be unmapped. The time counts from the last allocation of an
# array in the block, not from the moment when this array is freed: freeing an array does not read
# the clock.
_MOMENT = 1.0

_HAS_ADVICE = sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


class _Block:
    """The memory of an output. The memory stays mapped as long as this object exists."""

    __slots__ = ("address", "memory", "shelf", "since", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.since = 0.0
        self.shelf = _shelves[size > _SMALL]
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = address_of(np.frombuffer(self.memory, np.uint8))
        # A system without huge pages returns an error.
        with contextlib.suppress(OSError):
            self.memory.madvise(mmap.MADV_HUGEPAGE)


class _Lease:
    """The base object of an array whose memory is a `_Block`.

    Python frees the lease when it frees the last array that uses the block.
    """

    def __init__(self, block: _Block, size: int) -> None:
        self.__array_interface__ = {
            "data": (block.address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }
        block.since = time.monotonic()
        self._end = _End(self, block.shelf.append)
        self._end.block = block


class _End(weakref.ref[_Lease]):
    """A weak reference to a lease. When the lease is freed, the reference is appended to a shelf (a
    deque of such references).

    The callback of the reference is the method `append` of the shelf, which runs no Python code. A
    method `__del__` of the lease would be Python code. So a signal handler could run within
    `__del__`. If the handler then raised an exception, such as KeyboardInterrupt, Python would drop
    the exception. In a version with `__del__`, Ctrl-C had no effect in one of a hundred cases.
    """

    __slots__ = ("block",)
    block: _Block


# A shelf is a deque of references (`_End`) to leases of freed arrays, the newest last. As long as a
# shelf has the reference to a lease, the lease's block of memory stays mapped. This thread or
# another may free an array between any two bytecode instructions, and the freed lease is then
# appended to a shelf. So no code iterates over a shelf or relies on its length.
_shelves: tuple[deque[_End], ...] = deque(maxlen=_MOST_SMALL), deque(maxlen=_MOST_OTHERS)


def allocate(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new C-contiguous array with undefined contents.

    Raises
    ------
    MemoryError
    """
    size = math.prod(shape) * dtype.itemsize
    if not (_HAS_ADVICE and LARGE <= size <= _LARGEST):
        return np.empty(shape, dtype)
    block = _take(-(-size // _PAGE) * _PAGE)
    if block is None:
        return np.empty(shape, dtype)
    return np.asarray(_Lease(block, size)).view(dtype).reshape(shape)


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array as `allocate` does, but at an address that is a multiple of `ALIGNMENT`."""
    size = math.prod(shape) * dtype.itemsize
    if size >= LARGE and is_aligned(array := allocate(shape, dtype)):
        return array
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -address_of(memory) % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def is_aligned(array: np.ndarray) -> bool:
    """Whether an array begins at a multiple of `ALIGNMENT` bytes."""
    return address_of(array) % ALIGNMENT == 0


def _take(size: int) -> _Block | None:
    """Return a block of `size` bytes, or None if the system has no memory for it."""
    found: _End | None = None
    stale = time.monotonic() - _MOMENT
    for shelf in _shelves:
        # Each block is taken from the left of the shelf and, if it is kept, put back on the right.
        # Blocks that are freed while this loop runs are not visited.
        for _ in range(len(shelf)):
            try:
                end = shelf.popleft()
            except IndexError:  # another thread has emptied the shelf
                break
            # The newest block of the requested size is taken, because it is most likely
            # still in a cache.
            rest: _End | None = end
            if end.block.size == size:
                found, rest = end, found
            if rest is not None and rest.block.since > stale:
                shelf.append(rest)
    if found is not None:
        return found.block
    try:
        return _Block(size)
    except (OSError, ValueError):
        for shelf in _shelves:
            shelf.clear()
        return None
