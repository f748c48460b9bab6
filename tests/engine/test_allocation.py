"""Memory of large arrays: used again, never shared, and free for the system to take."""

from __future__ import annotations

import gc
import os
import sys
import time
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from backnorm import allocation
from backnorm.allocation import allocate

LARGE = (9, 1 << 20)

linux = pytest.mark.skipif(sys.platform != "linux", reason="MADV_FREE is Linux's")


@pytest.fixture(autouse=True)
def nothing_spare():
    allocation._spare.clear()
    yield
    allocation._spare.clear()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_are_like_those_of_numpy(dtype):
    for shape in (LARGE, (3, 4), (0, 7), (1 << 25,)):
        array = allocate(shape, np.dtype(dtype))
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.carray
        array.fill(3)
        assert (array == 3).all()


@linux
def test_the_memory_of_an_array_that_is_gone_is_used_again():
    array = allocate(LARGE, np.dtype(np.float32))
    address = array.ctypes.data
    del array
    again = allocate(LARGE, np.dtype(np.float32))
    assert again.ctypes.data == address
    # Also for another type of the same size.
    del again
    assert allocate((LARGE[0], LARGE[1] * 2), np.dtype(np.float16)).ctypes.data == address


@linux
def test_memory_in_use_is_not_given_away():
    array = allocate(LARGE, np.dtype(np.float32))
    array.fill(7)
    view = array[2:, 5:].T
    del array
    gc.collect()
    others = [allocate(LARGE, np.dtype(np.float32)) for _ in range(3)]
    for other in others:
        other.fill(9)
        assert not np.shares_memory(other, view)
    assert len({other.ctypes.data for other in others}) == 3
    assert (view == 7).all()


@linux
def test_kept_memory_is_marked_free():
    def lazily_free():
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("LazyFree"))

    array = allocate((64 << 20,), np.dtype(np.float32))
    array.fill(1)
    before = lazily_free()
    size = array.nbytes
    del array
    # All of it, but for pages that were taken already.
    until = time.monotonic() + 20
    while lazily_free() - before <= size // 2:
        assert time.monotonic() < until
        time.sleep(0.05)


@linux
def test_what_is_kept_is_bounded():
    sizes = [allocation.LARGE + i * allocation._PAGE for i in range(allocation._MOST_BLOCKS + 5)]
    arrays = [allocate((size,), np.dtype(np.uint8)) for size in sizes]
    while arrays:
        arrays.pop(0)
    kept = [block.size for block in allocation._spare]
    # The newest, and only so many bytes.
    assert len(kept) <= allocation._MOST_BLOCKS
    assert sum(kept) <= allocation._MOST_BYTES
    assert kept[-1] == sizes[-1]


@linux
def test_memory_is_marked_in_a_forked_child_too():
    array = allocate(LARGE, np.dtype(np.float32))
    with warnings.catch_warnings():
        # Later Pythons warn of forks beside threads, which is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        del array
        # It ends when nothing is left to mark.
        marking = allocation._marker is not None
        again = allocate(LARGE, np.dtype(np.float32))
        again.fill(1)
        os._exit(0 if marking and (again == 1).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@linux
def test_without_memory_numpy_says_so(monkeypatch):
    def refuse(size):
        raise OSError("no memory")

    monkeypatch.setattr(allocation, "_Block", refuse)
    assert allocate(LARGE, np.dtype(np.float32)).flags.owndata
    with pytest.raises(MemoryError):
        allocate((1 << 58,), np.dtype(np.float32))
