"""Memory between unreadable pages, in which an access beyond an array shows at once.

A *stretch* is memory with unreadable pages before and after it. An array lies in one with its end
at the upper pages, with its beginning at the lower ones, or as the allocators of frameworks put
it, at a cache line and as near to the upper pages as that allows. Bytes of the stretch that are
not the array's are canaries: all bits are set, which is NaN in every element type. Inputs are seen
through a second mapping of the same memory that cannot be written to.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os

import numpy as np

__all__ = ["ENDS", "PAGE", "Arena", "address_of"]

PAGE = mmap.PAGESIZE
LINE = 64

#: Where an array lies in its stretch.
ENDS = ("upper", "lower", "line")

#: Bytes around an array that are checked after a call: all of a small stretch, which may be a page.
NEAR = PAGE

# Kernels have been seen to read three rows further on than the array went.
_LEAST_GUARD, _GUARD = 1 << 20, 4

# Stretches have a few sizes, so that one serves again: mapping memory takes longer than a problem.
_LEAST, _STEP = PAGE, 4

# Participants that a call has at most here.
MOST_PARTICIPANTS = 4

# What Python's module does not name: PROT_NONE, and Linux's MAP_FIXED and MAP_NORESERVE.
_NONE, _SHARED, _FIXED = 0, mmap.MAP_SHARED, 0x10
_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
_BOTH = mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


def _map(place: int | None, size: int, protection: int, flags: int, file: int) -> int:
    found = _libc.mmap(place, size, protection, flags, file, 0)
    if found == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"no memory: {size} bytes")
    return int(found)


def address_of(array: np.ndarray) -> int:
    """Return where the first element of an array is."""
    return int(array.__array_interface__["data"][0])


class Stretch:
    """Memory between unreadable pages: one or several pieces of one size, evenly apart.

    Attributes
    ----------
    size : int
        Bytes of a piece.
    step : int
        Bytes from one piece to the next.
    first : int
        The address of the first piece.
    seen : int
        Its address where it can be read and not written to.
    """

    def __init__(self, size: int, pieces: int = 1) -> None:
        self.size = size
        self.step = size + max(_LEAST_GUARD, _GUARD * size)
        guard = self.step - size
        file = os.memfd_create("guarded")
        os.ftruncate(file, size * pieces)
        bases = []
        for protection in (_BOTH, mmap.PROT_READ):
            base = _map(None, guard + pieces * self.step, _NONE, _RESERVED, -1) + guard
            for k in range(pieces):
                found = _libc.mmap(
                    base + k * self.step, size, protection, _SHARED | _FIXED, file, k * size
                )
                assert found == base + k * self.step, ctypes.get_errno()
            bases.append(base)
        os.close(file)
        self.first, self.seen = bases
        whole = ctypes.c_char * (pieces * self.step - guard)
        self._bytes = np.frombuffer(whole.from_address(self.first), np.uint8)
        self._seen = np.frombuffer(whole.from_address(self.seen), np.uint8)

    def array(
        self, shape: tuple[int, ...], dtype: np.dtype, start: int, strides: tuple[int, ...] | None,
        *, read_only: bool,
    ) -> np.ndarray:  # fmt: skip
        """Return an array whose first element is at `start`."""
        memory = self._seen if read_only else self._bytes
        return np.ndarray(shape, dtype, memory, start, strides)

    def fill(self, start: int, end: int) -> None:
        """Write canaries to some bytes."""
        self._bytes[start:end] = 0xFF

    def holds(self, start: int, end: int) -> bool:
        """Whether some bytes are canaries still."""
        return start >= end or bool((self._bytes[start:end] == 0xFF).all())


def _start(size: int, room: int, end: str) -> int:
    """Return where so many bytes begin in a stretch of `room` bytes."""
    if end == "lower":
        return 0
    start = room - size
    return start // LINE * LINE if end == "line" else start


class _Place:
    """The bytes of a stretch that an array has."""

    __slots__ = ("begin", "end", "high", "low", "name", "stretch")

    def __init__(self, stretch: Stretch, begin: int, end: int, piece: int, name: str) -> None:
        self.stretch, self.begin, self.end, self.name = stretch, begin, end, name
        first = piece * stretch.step
        self.low = max(first, begin - NEAR)
        self.high = min(first + stretch.size, end + NEAR)

    def prepare(self) -> None:
        self.stretch.fill(self.low, self.begin)
        self.stretch.fill(self.end, self.high)

    def broken(self) -> str | None:
        if self.stretch.holds(self.low, self.begin) and self.stretch.holds(self.end, self.high):
            return None
        return f"{self.name}: bytes beside it were written to"


class Arena:
    """Hands out stretches, and takes all of them back at once.

    Attributes
    ----------
    end : str
        One of `ENDS`: where arrays lie in the stretches that are handed out now.
    """

    def __init__(self) -> None:
        self.end = ENDS[0]
        self._free: dict[tuple[int, int], list[Stretch]] = {}
        self._taken: list[tuple[tuple[int, int], Stretch]] = []
        self._places: list[_Place] = []

    def _stretch(self, size: int, pieces: int = 1) -> Stretch:
        room = _LEAST
        while room < size:
            room *= _STEP
        free = self._free.setdefault((room, pieces), [])
        found = free.pop() if free else Stretch(room, pieces)
        self._taken.append(((room, pieces), found))
        return found

    def reset(self) -> None:
        """Take back all stretches; the arrays in them are not to be used any more."""
        for kind, stretch in self._taken:
            self._free[kind].append(stretch)
        self._taken.clear()
        self._places.clear()

    def span_of(self, address: int) -> tuple[int, int] | None:
        """Return where the memory of the array at an address begins and ends."""
        for place in self._places:
            for base in (place.stretch.first, place.stretch.seen):
                if base + place.begin <= address <= base + place.end:
                    return base + place.begin, base + place.end
        return None

    def broken(self) -> list[str]:
        """Return what was written to beside the arrays that are handed out."""
        return [found for place in self._places if (found := place.broken())]

    def array(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        *,
        elements: int | None = None,
        offset: int = 0,
        strides: tuple[int, ...] | None = None,
        content: np.ndarray | None = None,
        read_only: bool = False,
    ) -> np.ndarray:
        """Return an array between unreadable pages, full of NaN if there is no `content`.

        Parameters
        ----------
        name : str
        shape, dtype
        elements : int, optional
            Those of memory, if the array has not all of them.
        offset : int
            Elements before its first one.
        strides : tuple of int, optional
            In bytes.
        content : numpy.ndarray, optional
            All elements of memory, one after the other.
        read_only : bool
            Whether the pages can be read alone (the array does not say so).
        """
        count = math.prod(shape) if elements is None else elements
        size = count * dtype.itemsize
        stretch = self._stretch(size)
        begin = _start(size, stretch.size, self.end)
        place = _Place(stretch, begin, begin + size, 0, name)
        place.prepare()
        if content is None:
            stretch.fill(begin, begin + size)
        elif count:
            memory = stretch.array((count,), dtype, begin, None, read_only=False)
            memory[...] = content
        self._places.append(place)
        return stretch.array(
            shape, dtype, begin + offset * dtype.itemsize, strides, read_only=read_only
        )

    def pieces(self, name: str, size: int, count: int) -> tuple[int, int]:
        """Return the address of the first of several pieces of memory full of NaN, and how far.

        So many bytes each, and unreadable pages between them.
        """
        stretch = self._stretch(size, MOST_PARTICIPANTS)
        start = _start(size, stretch.size, self.end)
        for k in range(count):
            begin = k * stretch.step + start
            place = _Place(stretch, begin, begin + size, k, name)
            place.prepare()
            stretch.fill(begin, begin + size)
            self._places.append(place)
        return stretch.first + start, stretch.step
