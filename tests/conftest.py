"""Fixtures that make the tests strict: seeded data, read-only inputs, outputs poisoned with NaN."""

from __future__ import annotations

import importlib
import zlib

import numpy as np
import pytest

# The one function through which the engine allocates what it returns, and where it is called.
ALLOCATOR = ("backnorm.execute", "allocate")
# The module that takes scratch memory for the kernels.
SCRATCH = "backnorm.kernels.cpu.launch"


@pytest.fixture
def rng(request):
    """A generator of random numbers that is seeded by the name of the test."""
    return np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture
def poison():
    """Fill an array with NaN and return it: what is not written afterwards shows."""

    def fill(array):
        array.fill(np.nan)
        return array

    return fill


@pytest.fixture
def read_only():
    """Return read-only views: a kernel that writes to its inputs fails."""

    def views(*arrays):
        result = []
        for array in arrays:
            view = array.view()
            view.flags.writeable = False
            result.append(view)
        return result

    return views


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """Poison the engine's outputs and scratch memory; returns the list of outputs allocated."""
    allocated = []
    engine, name = importlib.import_module(ALLOCATOR[0]), ALLOCATOR[1]
    original = getattr(engine, name)

    def allocate(*args, **kwargs):
        array = original(*args, **kwargs)
        array.fill(np.nan)
        allocated.append(array)
        return array

    monkeypatch.setattr(engine, name, allocate)
    monkeypatch.setattr(importlib.import_module(SCRATCH), "np", _PoisonedNumpy())
    return allocated


class _PoisonedNumpy:
    """NumPy, but `empty` of floating-point numbers is full of NaN."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def empty(*args, **kwargs):
        array = np.empty(*args, **kwargs)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array
