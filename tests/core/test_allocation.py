"""Memory of large arrays is used again, is never shared, and is given back."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings

import ml_dtypes
import numpy as np
import pytest

from backnorm import allocation
from backnorm.allocation import aligned, allocate, is_aligned
from tests.support import internals

LARGE = (9, 1 << 20)
FLOAT32, BYTE = np.dtype(np.float32), np.dtype(np.uint8)

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory of our own is Linux's")


forget, kept = internals.drop_spare_blocks, internals.spare_blocks


@pytest.fixture(autouse=True)
def nothing_spare():
    forget()
    yield
    forget()


_COMMON = """
import gc, os, sys, threading, time
import numpy as np
from backnorm import allocation
from backnorm.allocation import allocate
MB, BYTE = 1 << 20, np.dtype(np.uint8)
tasks = len(os.listdir("/proc/self/task"))  # NumPy has some

def full(size):
    array = allocate((size,), BYTE)
    array.fill(1)
    return array

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
"""


def run(code, timeout=120):
    """Run a program that begins with `_COMMON`; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _COMMON + code],
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "dtype",
    [
        np.float32,
        *(
            pytest.param(dtype, marks=pytest.mark.long)
            for dtype in (np.float64, np.float16, ml_dtypes.bfloat16)
        ),
    ],
)
def test_allocate_returns_writable_contiguous_array(dtype):
    for shape in (LARGE, (3, 4), (0, 7), (), (1 << 25,), (1 << 27,)):
        array = allocate(shape, np.dtype(dtype))
        assert (array.shape, array.dtype) == (shape, np.dtype(dtype))
        assert array.flags.carray
        array.fill(3)
        assert (array == 3).all()


@pytest.mark.parametrize("bytes_", [2, 1000, LARGE[0] * LARGE[1], allocation._LARGEST + 4])
def test_aligned_array_of_any_size_begins_at_cache_line(bytes_):
    for _ in range(4):
        array = aligned((bytes_ // 2, 2), BYTE)
        assert array.shape == (bytes_ // 2, 2)
        assert array.flags.carray
        assert is_aligned(array)


@linux
def test_allocate_reuses_memory_of_deleted_array():
    array = allocate(LARGE, FLOAT32)
    address = array.ctypes.data
    del array
    again = allocate(LARGE, FLOAT32)
    assert again.ctypes.data == address
    # Also for another type of the same size.
    del again
    assert allocate((LARGE[0], LARGE[1] * 2), np.dtype(np.float16)).ctypes.data == address


@linux
def test_allocate_does_not_reuse_memory_of_live_view():
    array = allocate(LARGE, FLOAT32)
    array.fill(7)
    view = array[2:, 5:].T
    del array
    gc.collect()
    others = [allocate(LARGE, FLOAT32) for _ in range(3)]
    for other in others:
        other.fill(9)
        assert not np.shares_memory(other, view)
    assert len({other.ctypes.data for other in others}) == 3
    assert (view == 7).all()


@linux
def test_spare_blocks_are_bounded():
    page, most, largest = allocation._PAGE, allocation._SMALL, allocation._LARGEST
    small = [page + i % 5 * page for i in range(15)]
    large = [largest - i * page for i in range(5)]
    arrays = [allocate((size,), BYTE) for size in (*small, most, most + 1, *large, largest + 1)]
    assert kept() == [[], []]
    while arrays:
        arrays.pop(0)
    # The newest; the largest array is NumPy's.
    assert kept() == [[*small[-11:], most], large[-3:]]
    bound = sum(
        shelf.maxlen * size
        for shelf, size in zip(allocation._shelves, (most, largest), strict=True)
    )
    assert bound == 768 << 20


@linux
def test_allocate_reuses_newest_fitting_block_and_drops_old_blocks(monkeypatch):
    sizes = [4 << 20, 6 << 20, 64 << 20, 6 << 20]
    arrays = [allocate((size,), BYTE) for size in sizes]
    first, newest = arrays[1].ctypes.data, arrays[3].ctypes.data
    while arrays:
        arrays.pop(0)
    # The newest that fits is used. The others stay, in the order in which they came.
    array = allocate((6 << 20,), BYTE)
    assert array.ctypes.data == newest != first
    assert kept() == [[4 << 20, 6 << 20], [64 << 20]]
    internals.let_spare_blocks_be_old(monkeypatch)
    # One that fits is used however old it is.
    other = allocate((6 << 20,), BYTE)
    assert other.ctypes.data == first
    assert kept() == [[], []]


@pytest.mark.long
@linux
@pytest.mark.parametrize(
    "sizes",
    [
        "[48 * MB] * 12",
        "[5 * MB, 7 * MB] * 20",
        "[192 * MB] * 4 + [16 * MB] * 15",
        "[193 * MB] * 3",
    ],
)
def test_resident_memory_after_deletion_of_arrays_is_bounded(sizes):
    code = f"""
full(MB), full(3 * MB)
before = resident()
sizes = {sizes}
arrays = [full(size) for size in sizes]
assert resident() - before > 0.9 * sum(sizes)
del arrays
time.sleep(1)
small, large = ([s for s in sizes if test(s)] for test in (
    lambda s: s <= 16 * MB, lambda s: 16 * MB < s <= 192 * MB))
bound = sum(sorted(small)[-12:]) + sum(large[-3:])
assert bound <= 768 * MB
# And page tables, and what NumPy and Python keep.
assert resident() - before <= bound + 16 * MB, (resident() - before, bound)
assert len(os.listdir("/proc/self/task")) == tasks and threading.active_count() == 1
# The next allocation drops it.
array = full(2 * MB)
assert resident() - before <= 16 * MB
print("good")
"""
    assert run(code) == "good"


_GARBAGE = """
class Node:
    pass

def garbage(array):
    node = Node()
    node.itself, node.array = node, array

for threshold in {thresholds}:
    gc.set_threshold(threshold)
    until = time.monotonic() + {seconds}
    while time.monotonic() < until:
        for size in (2 * MB, 3 * MB, 4 * MB, 5 * MB):
            garbage(make(size))
    gc.set_threshold(700)
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == tasks
print("good")
"""

# Pages are not written, so that there are many rounds.
_BARE = """
def make(size):
    return allocate((size,), BYTE)
"""

_PUBLIC = """
import backnorm
backnorm.set_num_threads(1)
mean, variance = np.zeros(4, "f"), np.ones(4, "f")
inputs = {size: np.ones((1, 4, size // 16), "f") for size in (2 * MB, 3 * MB, 4 * MB, 5 * MB)}
def make(size):
    x = inputs[size]
    return backnorm.batch_norm_backward(x, x, mean, variance, epsilon=1e-5).dx
make(2 * MB)
"""


@pytest.mark.long
@linux
@pytest.mark.parametrize("make", [_BARE, _PUBLIC], ids=["bare", "public"])
def test_allocate_during_garbage_collection_does_not_hang(make):
    # A collection may run at any point of an allocation or of the deletion of an array. It hung
    # when a thread was started there under a lock.
    assert run(make + _GARBAGE.format(thresholds=(31, 101, 211), seconds=1)) == "good"


@linux
@pytest.mark.sweep
@pytest.mark.parametrize("make", [_BARE, _PUBLIC], ids=["bare", "public"])
def test_allocate_during_collection_at_each_threshold_does_not_hang(make):
    code = make + _GARBAGE.format(thresholds="range(1, 401)", seconds=0.1)
    assert run(code, timeout=280) == "good"


@linux
def test_allocate_in_finaliser_returns_separate_memory():
    code = """
class Owner:
    def __init__(self):
        self.array = full(3 * MB)
    def __del__(self):
        del self.array
        made.append(full(3 * MB))
        made.append(full(2 * MB))

class Again:
    # Its end is within the end of the array that is based on it.
    def __del__(self):
        made.append(full(5 * MB))

made = []
for _ in range(60):
    Owner()
    owner = Owner()
    owner.itself, owner.again = owner, Again()
    del owner
    full(5 * MB)
    if len(made) > 50:
        assert len({array.ctypes.data for array in made}) == len(made)
        made.clear()
gc.collect()
print("good")
"""
    assert run(code) == "good"


@linux
def test_allocate_in_threads_does_not_share_blocks():
    size, wrong = (1 << 20) // 2, []

    def use(number):
        random = np.random.default_rng(number)
        mine = []
        for turn in range(300):
            array = allocate((size + 1024 * int(random.integers(3)) * 256,), FLOAT32)
            array[::512] = value = number * 1000 + turn
            mine.append((array, value))
            if len(mine) > random.integers(4):
                array, value = mine.pop(int(random.integers(len(mine))))
                if not (array[::512] == value).all():
                    wrong.append((number, turn))
                if turn % 3 == 0:  # another thread ends it
                    shared.append(array)
                del array
            if len(shared) > 5:
                shared.clear()

    shared = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        workers = [threading.Thread(target=use, args=(number,)) for number in range(6)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(kept()[0]) <= 12


@linux
def test_allocate_after_fork_reuses_spare_block_in_both_processes():
    in_use, spare = allocate(LARGE, FLOAT32), allocate(LARGE, FLOAT32)
    in_use.fill(0)
    spare.fill(1)
    address = spare.ctypes.data
    del spare
    with warnings.catch_warnings():
        # Later Pythons warn of forks beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        good = False
        try:
            again = allocate(LARGE, FLOAT32)
            again.fill(5)
            good = again.ctypes.data == address and (in_use == 0).all()
            del in_use
            other = allocate(LARGE, FLOAT32)
            other.fill(6)
            good = bool(good and (again == 5).all() and threading.active_count() == 1)
        finally:
            os._exit(0 if good else 1)
    again = allocate(LARGE, FLOAT32)
    again.fill(7)
    assert again.ctypes.data == address
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (again == 7).all()
    assert (in_use == 0).all()


@linux
@pytest.mark.parametrize(
    "state",
    [
        "held = full(3 * MB)",
        "held = [full(3 * MB)]; held.append(held)",
        "sys.held = full(3 * MB)",
        "np.held = allocation.held = [full(3 * MB), full(64 * MB)]",
        # When modules are emptied already.
        """
class Late:
    def __init__(self):
        self.array = full(3 * MB)
    def __del__(self, full=full, MB=MB):
        del self.array
        try:
            full(4 * MB)
        except (AttributeError, NameError, TypeError, ImportError):
            pass  # `full` has no NumPy any more
late = sys.late = Late(); late.itself = late
builtins = __import__("builtins"); builtins.late = Late()
""",
        # The array is deleted after the module `allocation` has been emptied.
        "held = full(3 * MB); vars(allocation).update(dict.fromkeys(vars(allocation)))",
        """
import atexit
atexit.register(lambda array: full(3 * MB), full(3 * MB))
held = full(5 * MB)
""",
        """
def work():
    while True:
        full(2 * MB)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
""",
    ],
)
def test_arrays_deleted_at_interpreter_exit_raise_no_errors(state):
    # Nothing on stderr either: an exception in a finaliser would be there.
    assert run(state + "\nprint('good')") == "good"


@linux
def test_uninitialised_lease_keeps_no_block():
    allocation._Lease.__new__(allocation._Lease)
    assert kept() == [[], []]


def test_array_deletion_calls_no_python_function():
    """Python would run signal handlers there, and lose the exceptions that they raise."""
    assert not hasattr(allocation._Lease, "__del__")
    array = allocate(LARGE, np.dtype(np.float32))
    events = []
    sys.setprofile(lambda frame, event, argument: events.append((event, frame.f_code.co_name)))
    try:
        del array
    finally:
        sys.setprofile(None)
    called = [name for event, name in events if event == "call"]
    assert called == []


@linux
def test_allocate_without_free_block_uses_numpy(monkeypatch):
    spare = allocate((5 << 20,), BYTE)
    del spare
    internals.allocate_no_block(monkeypatch)
    assert allocate(LARGE, FLOAT32).flags.owndata
    assert kept() == [[], []]
    with pytest.raises(MemoryError):
        allocate((1 << 58,), FLOAT32)
