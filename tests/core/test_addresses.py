"""Addresses of arrays, read where NumPy keeps them: the same that NumPy says."""

from __future__ import annotations

import struct
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from backnorm import addresses
from backnorm.addresses import HEADER, address_of
from backnorm.allocation import LARGE, allocate

_PLAIN = np.arange(60, dtype=np.float32).reshape(3, 4, 5)


class _Named(np.ndarray):
    """A subclass with an attribute of its own."""

    def __array_finalize__(self, source):
        self.name = "named"


class _Elsewhere(np.ndarray):
    """A subclass that does not say where its elements are."""

    ctypes = SimpleNamespace(data=8)


def _read_only():
    array = _PLAIN.copy()
    array.flags.writeable = False
    return array


_ARRAYS = {
    "plain": _PLAIN,
    "view": _PLAIN[1:, 2:],
    "negative strides": _PLAIN[::-1, :, ::-2],
    "transposed": _PLAIN.T,
    "read-only": _read_only(),
    "0-d": np.array(2.5),
    "empty": np.empty((3, 0, 5)),
    "empty view": _PLAIN[3:],
    "broadcast": np.broadcast_to(np.float32(1), (2, 3)),
    "byte-swapped": _PLAIN.astype(">f4"),
    "bfloat16": _PLAIN.astype(ml_dtypes.bfloat16),
    "float64": _PLAIN.astype(np.float64),
    "bytes": np.frombuffer(b"0123456789abcdef", np.uint8)[3:],
    "not aligned": np.zeros(33, np.uint8)[1:].view(np.float64),
    "field": np.zeros(4, [("a", np.int8), ("b", np.float32)])["b"],
    "subclass": _PLAIN.view(_Named),
    "matrix": _PLAIN[0].view(np.matrix),
    "masked": np.ma.masked_array(_PLAIN, _PLAIN > 3),
    "memory of our own": allocate((LARGE // 4 + 5,), np.dtype(np.float32))[5:],
}


@pytest.mark.parametrize("array", _ARRAYS.values(), ids=_ARRAYS)
def test_address_of_equals_numpy_data_address(array):
    assert address_of(array) == array.ctypes.data


@pytest.mark.skipif(
    sys.implementation.name != "cpython" or struct.calcsize("P") != 8, reason="CPython of 64 bits"
)
def test_address_of_in_cpython_does_not_use_numpy():
    assert address_of is not addresses._by_numpy
    assert object.__basicsize__ == HEADER


def _numpy_elsewhere():
    """Return samples of which one has no address behind the header."""
    return [*samples()[:-1], np.ones(3).view(_Elsewhere)]


samples = addresses._samples


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("sys", SimpleNamespace(implementation=SimpleNamespace(name="pypy"))),
        ("struct", SimpleNamespace(calcsize={"P": 4}.get)),
        ("_samples", _numpy_elsewhere),
    ],
)
def test_header_of_unsupported_interpreter_or_arrays_is_zero(monkeypatch, name, other):
    monkeypatch.setattr(addresses, name, other)
    assert addresses._header() == 0
    assert addresses._by_numpy(_PLAIN) == address_of(_PLAIN)
