"""Where the elements of an array begin, as a number.

``array.ctypes.data`` takes more than a microsecond, as does ``__array_interface__``, and a call
needs up to thirteen addresses. NumPy promises extension modules that an array object is what
Python puts before every object and then the address of its elements (``PyArrayObject_fields`` in
``ndarraytypes.h``, which they read without a call, so it cannot change within NumPy 2). So it is
read here, too: 0.1 µs. In a call the kernels' caller reads it (`kernels.team`), from the addresses
of the objects, which Python knows in 0.02 µs. That it is there is checked when this is imported,
with arrays of several kinds; where it is not (PyPy), the slow way is taken.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["HEADER", "MEMORY", "address_of"]


_HEADER = object.__basicsize__


def _slow(array: Any) -> int:
    """Return where the elements of an array are."""
    address: int = array.ctypes.data
    return address


def _samples() -> list[np.ndarray]:
    plain = np.arange(24, dtype=np.float32)
    read_only = plain.view()
    read_only.flags.writeable = False
    return [
        plain,
        plain[5:],
        plain[::-2],
        read_only,
        plain.reshape(2, 3, 4).transpose(2, 0, 1),
        np.zeros((3, 0)),
        np.array(1.5),
        np.broadcast_to(plain[:1], (4, 5)),
        plain.astype(">f4"),
        np.ones(3, ml_dtypes.bfloat16),
        np.ones((2, 2), np.float16).view(np.matrix),
    ]


def _memory() -> Any:
    """Return all memory as an array, or None where headers of arrays cannot be read there.

    Element k is what comes after the header of an object at 8 k.
    """
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8:
        return None
    memory = (ctypes.c_int64 * (1 << 59)).from_address(_HEADER)
    right = all(memory[id(array) >> 3] == _slow(array) for array in _samples())
    return memory if right else None


#: ``MEMORY[id(array) >> 3]`` is where the elements of an array are; None where it is not.
MEMORY = _memory()

#: Size of the header of an array object, which the address of its elements follows; 0 where that is
#: not known.
HEADER = 0 if MEMORY is None else _HEADER


# What a function uses is among its arguments, because local names are the quickest.
def _quick(array: Any, memory: Any = MEMORY, id: Any = id) -> int:
    address: int = memory[id(array) >> 3]
    return address


#: address_of(array): where the first element of a NumPy array is.
address_of: Callable[[Any], int] = _slow if MEMORY is None else _quick
