"""The access to memory by which a process ended: which array it concerns, and whether it wrote.

If the handler of a signal has an alternate stack (`sigaltstack`), Linux saves the registers on this
stack before it calls the handler. The address of the access and its kind are among them. The
handler of `faulthandler` has such a stack, for the main thread. Here, the stack is a file, which
another process can read when the process has ended. An access by another thread, for which there is
no alternate stack, leaves nothing in the file.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import platform
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from backnorm.conformance.verify._events import UNKNOWN_ACCESS
from backnorm.conformance.verify._memory import Guarded

__all__ = ["SegfaultRecord", "last_access"]

# The file has a line of JSON about the arrays, and then the stack. Registers of vectors take up to
# 11 KB of it.
_FILE = "segfault"
_LINE, _STACK = 1 << 13, 1 << 18
# Addresses below this one are those of elements of an array at a null pointer.
_NULL = 1 << 16


class SegfaultRecord:
    """The record that another process can read after this process has ended by SIGSEGV.

    `faulthandler` must be enabled before.
    """

    def __init__(self, folder: Path) -> None:
        with (folder / _FILE).open("w+b") as file:
            file.truncate(_LINE + _STACK)
            self._memory = mmap.mmap(file.fileno(), 0)
        self._stack = np.frombuffer(self._memory, np.uint8).ctypes.data + _LINE
        if sys.platform == "linux":
            # The structure `stack_t`: an address, flags, and a size.
            stack = struct.pack("@PiN", self._stack, 0, _STACK)
            ctypes.CDLL(None).sigaltstack(stack, None)

    def expect(self, arrays: Iterable[tuple[str, Guarded | None]]) -> None:
        """Note the arrays of the next call."""
        places = [(name, *each.place) for name, each in arrays if each is not None]
        line = json.dumps([self._stack, places]).encode()
        self._memory[:_LINE] = line.ljust(_LINE)


class _Access(NamedTuple):
    """An address and what the process did there: "read", "wrote", or "jumped"."""

    address: int
    verb: str


def last_access(folder: Path) -> str:
    """Return the access by which a process ended, such as "it read right behind the end of dy".

    `folder` is that of the process's record. If the access is not known, return
    :data:`._events.UNKNOWN_ACCESS`.
    """
    content = (folder / _FILE).read_bytes()
    line = content[:_LINE].strip(b"\0 ")
    stack, places = json.loads(line) if line else (0, [])
    access = _access(content, struct.pack("@PiN", stack, 0, _STACK))
    if access is None:
        return UNKNOWN_ACCESS
    verb = access.verb
    if access.address < _NULL:
        return f"it {verb} {'to' if verb == 'jumped' else 'at'} a null pointer"
    if verb == "jumped":
        return "it jumped to an address that has no code"
    for name, first, last in places:
        if first <= access.address < first + mmap.PAGESIZE:
            return f"it {verb} right before the beginning of {name}"
        if last - mmap.PAGESIZE <= access.address < last:
            return f"it {verb} right behind the end of {name}"
    return f"it {verb} outside of an array"


def _access(content: bytes, stack: bytes) -> _Access | None:
    """Return the access that the saved registers describe, if there are any.

    The structure `ucontext_t` has `stack` behind two words, and then the registers.
    """
    context = content.rfind(stack) - 16
    reader = _READERS.get(platform.machine()) if sys.platform == "linux" else None
    return None if reader is None or context < _LINE else reader(content, context)


def _of_x86(content: bytes, context: int) -> _Access | None:
    # The last of 23 registers are the error code, the trap, the old mask and CR2.
    error, trap, _, address = struct.unpack_from("@4Q", content, context + 40 + 19 * 8)
    # Another trap than a page fault has no address. Bit 1 of the error is that of a write, bit 4
    # that of the fetch of an instruction.
    verb = "jumped" if error & 1 << 4 else "wrote" if error & 1 << 1 else "read"
    return _Access(address, verb) if trap == 14 else None


def _of_arm(content: bytes, context: int) -> _Access | None:
    # The address, 31 registers, sp, pc and pstate; then records, of which one has the syndrome.
    (address,) = struct.unpack_from("@Q", content, context + 176)
    record = context + 464
    while True:
        magic, size = struct.unpack_from("@2I", content, record)
        if magic == 0x45535201:
            (syndrome,) = struct.unpack_from("@Q", content, record + 8)
            # Classes 0x20 and 0x21 are those of aborted fetches of instructions, 0x24 and 0x25
            # those of aborted data accesses; bit 6 is that of a write.
            kind = syndrome >> 26 & 0x3F
            if kind in (0x20, 0x21):
                return _Access(address, "jumped")
            verb = "wrote" if syndrome & 1 << 6 else "read"
            return _Access(address, verb) if kind in (0x24, 0x25) else None
        if not size:
            return None
        record += size


_READERS = {"x86_64": _of_x86, "aarch64": _of_arm}
