"""The same bits for any number of threads, in any run; `test_forced_plans`: for any schedule."""

from __future__ import annotations

import sys
import threading

import ml_dtypes
import numpy as np
import pytest

import backnorm

# A shape of every kind: segments in pieces, segments in rows, grouped columns, columns, joined
# rows with a rest; large enough to be shared out.
_SHAPES = [(3, 5, 9001), (40, 6, 1100), (90, 17, 49), (4099, 24), (20011, 3)]


def _bits(gradients):
    return [np.ascontiguousarray(a).view(np.uint8).tobytes() for a in gradients]


def _case(rng, shape, dtype):
    x = (rng.standard_normal(shape) * 3 + 10).astype(dtype)
    dy = (rng.standard_normal(shape) + 0.2 * x.astype(np.float64)).astype(dtype)
    parameter = np.float32 if x.dtype.itemsize == 2 else dtype
    channels = shape[1]
    mean = (10 + rng.standard_normal(channels)).astype(parameter)
    variance = (9 * (0.5 + rng.random(channels))).astype(parameter)
    gamma = rng.standard_normal(channels).astype(parameter)
    return x, dy, mean, variance, gamma


@pytest.fixture
def many_processors(monkeypatch):
    """Let this machine pass for one with eight processors; restore the setting afterwards."""
    few = backnorm.machine.detect()
    many = backnorm.machine.Machine(8, few.cache_per_core, few.cache_shared, few.name)
    monkeypatch.setattr("backnorm.machine.detect", lambda: many)
    monkeypatch.setattr("backnorm.machine.processors", lambda: many.threads)
    # Which another test may have imported, and has its own number.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = backnorm.get_num_threads()
    yield
    monkeypatch.undo()
    backnorm.set_num_threads(before)


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "arithmetic"),
    [
        (np.float64, None),
        (np.float32, "float64"),
        (np.float32, "float32"),
        (np.float16, "float32"),
        (np.float16, "float64"),
        (ml_dtypes.bfloat16, None),
    ],
)
def test_backward_bits_do_not_depend_on_thread_count(
    rng, shape, dtype, arithmetic, many_processors
):
    case = _case(rng, shape, dtype)
    reference = None
    for threads in (1, 2, 3, 8):
        backnorm.set_num_threads(threads)
        assert backnorm.get_num_threads() == threads
        gradients = backnorm.batch_norm_backward(*case, epsilon=1e-5, arithmetic=arithmetic)
        bits = _bits(gradients)
        reference = reference or bits
        assert bits == reference


def test_backward_called_repeatedly_has_the_same_bits(rng):
    case = _case(rng, (90, 17, 49), np.float32)
    first = _bits(backnorm.batch_norm_backward(*case, epsilon=1e-5))
    for _ in range(20):
        assert _bits(backnorm.batch_norm_backward(*case, epsilon=1e-5)) == first


def test_backward_in_concurrent_threads_has_the_bits_of_serial_calls(rng):
    cases = [_case(rng, shape, np.float32) for shape in _SHAPES]
    expected = [_bits(backnorm.batch_norm_backward(*case, epsilon=1e-5)) for case in cases]
    wrong = []

    def work(which):
        for _ in range(30):
            got = _bits(backnorm.batch_norm_backward(*cases[which], epsilon=1e-5))
            wrong.extend([which] if got != expected[which] else [])

    threads = [threading.Thread(target=work, args=(i % len(cases),)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
