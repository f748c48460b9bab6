"""The address of an array's first element, as a number.

A call passes up to ten addresses. NumPy's own attributes, ``array.ctypes.data`` and
``__array_interface__``, take a microsecond each: a call on 8 x 16 x 8 x 8 elements would take 15.7
microseconds instead of 7.6 (AMD EPYC, Zen 4).

An array object stores the address of its data right after the object header. This layout
(``PyArrayObject_fields`` in ``ndarraytypes.h``) is part of the ABI of NumPy 2, because extension
modules read it directly. In a call, machine code reads the address from the array object
(`kernels.team`); Python code reads it with `address_of`. When this module is imported, it reads the
addresses of a few test arrays in this way, and compares them with the addresses that NumPy gives.
If these addresses differ, or the interpreter is not CPython, all addresses are read from NumPy's
attributes.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

_word = ctypes.c_int64.from_address


def _by_numpy(array: Any) -> int:
    """Return the address of an array's first element, as NumPy reports it."""
    address: int = array.ctypes.data
    return address


def _behind_header(array: Any, header: int = object.__basicsize__) -> int:
    """Return the address of the data, which the array object stores directly behind its header."""
    return data_of(id(array), header)


def data_of(address: int, header: int) -> int:
    """Return the address of the data of the array object at `address`."""
    return _word(address + header).value


def _samples() -> list[np.ndarray]:
    """Return arrays of several kinds: views, zero-dimensional, empty, byte-swapped, a subclass."""
    plain = np.arange(24, dtype=np.float32)
    views = plain[5:], plain[::-2], plain.reshape(2, 3, 4).transpose(2, 0, 1), np.array(1.5)
    return [plain, *views, np.zeros((3, 0)), plain.astype(">f4"), np.ones((2, 2)).view(np.matrix)]


def _header() -> int:
    """Return the size of an array object's header, in bytes.

    Return 0 if an array object does not store the address of its data right behind its header.
    """
    if sys.implementation.name != "cpython" or struct.calcsize("P") != 8:
        return 0
    right = all(_behind_header(array) == _by_numpy(array) for array in _samples())
    return object.__basicsize__ if right else 0


#: Size in bytes of the header of a NumPy array object. The field right behind the header has the
#: address of the array's first element. HEADER is 0 if the layout of array objects is not known.
HEADER = _header()

#: address_of(array): the address of the first element of a NumPy array.
address_of: Callable[[Any], int] = _behind_header if HEADER else _by_numpy
