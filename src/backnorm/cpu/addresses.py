"""Where the elements of an array begin, as a number.

``array.ctypes.data`` takes more than a microsecond, as does ``__array_interface__``, and a call
needs up to thirteen addresses. NumPy promises extension modules that an array object is what
Python puts before every object and then the address of its elements (``PyArrayObject_fields`` in
``ndarraytypes.h``, which they read without a call, so it cannot change within NumPy 2). So it is
read here, too: 0.1 µs. That it is there is checked when this is imported, with
arrays of several kinds; where it is not (PyPy), the slow way is taken.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from backnorm.cpu.record import ADDRESSES

__all__ = ["address_of", "addresses_of"]


def _slow(array: Any) -> int:
    """Return where the elements of an array are."""
    address: int = array.ctypes.data
    return address


def _slow_all(*arrays: Any, **named: Any) -> tuple[int, ...]:
    """Return the addresses of a record."""
    given = dict(zip(ADDRESSES, arrays, strict=False)) | named
    found = (given.get(name) for name in ADDRESSES)
    return tuple(0 if array is None else _slow(array) for array in found)


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


def _found() -> tuple[Callable[[Any], int], Callable[..., tuple[int, ...]]]:
    """Return `address_of` and `addresses_of`: the quick ones, if they find what the others do."""
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8:
        return _slow, _slow_all
    # All memory as one array: element k is what comes after the header of an object at 8 k.
    memory = (ctypes.c_int64 * (1 << 59)).from_address(object.__basicsize__)

    # What a function uses is among its arguments, because local names are the quickest.
    def quick(array: Any, memory: Any = memory, id: Any = id) -> int:
        address: int = memory[id(array) >> 3]
        return address

    def quick_all(
        x: Any,
        dy: Any,
        out: Any,
        residual: Any = None,
        mask: Any = None,
        mean: Any = None,
        variance: Any = None,
        gamma: Any = None,
        beta: Any = None,
        result: Any = None,
        result_2: Any = None,
        memory: Any = memory,
        id: Any = id,
    ) -> tuple[int, ...]:
        return (
            memory[id(x) >> 3],
            0 if dy is None else memory[id(dy) >> 3],
            0 if out is None else memory[id(out) >> 3],
            0 if residual is None else memory[id(residual) >> 3],
            0 if mask is None else memory[id(mask) >> 3],
            0 if mean is None else memory[id(mean) >> 3],
            0 if variance is None else memory[id(variance) >> 3],
            0 if gamma is None else memory[id(gamma) >> 3],
            0 if beta is None else memory[id(beta) >> 3],
            0 if result is None else memory[id(result) >> 3],
            0 if result_2 is None else memory[id(result_2) >> 3],
            0,
            0,
        )

    samples = _samples()
    right = all(quick(array) == _slow(array) for array in samples)
    right = right and quick_all(*samples) == _slow_all(*samples)
    return (quick, quick_all) if right else (_slow, _slow_all)


#: address_of(array): where the first element of a NumPy array is. addresses_of(x, dy, out, ...):
#: the addresses of a record, in the order of `record.ADDRESSES`, of arrays or None; there are no
#: running statistics among them.
address_of, addresses_of = _found()
