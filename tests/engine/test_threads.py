"""The pool, in the situations that end other threading layers. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import backnorm
from backnorm import machine, threads
from backnorm.kernels.cpu import threads as pool

_COMMON = """
import os, threading
import numpy as np
import backnorm
rng = np.random.default_rng(0)
x = rng.standard_normal((16, 8, 2000), dtype=np.float32)
dy = rng.standard_normal(x.shape, dtype=np.float32) * x
mean, variance = x.mean((0, 2)), x.var((0, 2))
def work():
    return backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-5).dx.tobytes()
expected = work()
"""


def _run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _COMMON + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(sys.platform == "win32", reason="no fork on Windows")
def test_a_forked_child_computes_the_same():
    code = """
child = os.fork()
if child == 0:
    os._exit(0 if all(work() == expected for _ in range(20)) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), work() == expected)
"""
    assert _run(code) == "0 True"


@pytest.mark.skipif(sys.platform == "win32", reason="no fork on Windows")
def test_children_forked_while_other_threads_compute():
    code = """
stop = False
def busy():
    while not stop:
        work()
threads = [threading.Thread(target=busy) for _ in range(2)]
[t.start() for t in threads]
results = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        os._exit(0 if work() == expected else 3)
    results.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop = True
[t.join() for t in threads]
print(results)
"""
    assert _run(code) == str([0] * 8)


def test_other_openmp_users_do_not_disturb():
    pytest.importorskip("torch")
    code = """
import torch
stop = False
def busy():
    t = torch.randn(400, 400)
    while not stop:
        torch.relu(t @ t).sum()
thread = threading.Thread(target=busy); thread.start()
same = all(work() == expected for _ in range(100))
stop = True; thread.join()
child = os.fork()
if child == 0:
    os._exit(0 if work() == expected else 3)
print(same, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert _run(code) == "True 0"


def test_processes_started_together_share_the_compiled_kernels(tmp_path, monkeypatch):
    """Several processes that compile different signatures of one kernel at once, from nothing."""
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path))
    code = """
import sys
import numpy as np, backnorm
types = [np.float32, np.float64]
for dtype in (types if int(sys.argv[1]) % 2 else types[::-1]):
    x = np.random.default_rng(1).standard_normal((30, 5)).astype(dtype)
    g = backnorm.batch_norm_backward(x, x * x, x.mean(0), x.var(0), epsilon=1e-3)
    s = 1 / np.sqrt(x.var(0) + 1e-3)
    c = x - x.mean(0)
    dy = x * x
    want = s * (dy - dy.mean(0) - c * s * s * (dy * c).mean(0))
    np.testing.assert_allclose(g.dx, want, rtol=1e-3, atol=1e-4)
"""
    for _ in range(2):
        processes = [
            subprocess.Popen([sys.executable, "-c", code, str(i)], stderr=subprocess.PIPE)
            for i in range(3)
        ]
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode()
    names = [path.name for path in tmp_path.iterdir()]
    assert names
    assert not [name for name in names if name.endswith(".tmp")]


def test_work_is_done_even_if_no_thread_ever_starts(monkeypatch, rng):
    """The caller claims every item itself; it waits for nothing that has not begun."""

    class Idle:
        bell = pool._pool.bell

        def submit(self, task, copies):
            pass

    monkeypatch.setattr(pool, "_pool", Idle())
    x = rng.standard_normal((40, 6, 1100), dtype=np.float32)
    dy = rng.standard_normal(x.shape, dtype=np.float32)
    got = backnorm.batch_norm_backward(x, dy, x.mean((0, 2)), x.var((0, 2)), epsilon=1e-5)
    monkeypatch.undo()
    again = backnorm.batch_norm_backward(x, dy, x.mean((0, 2)), x.var((0, 2)), epsilon=1e-5)
    assert got.dx.tobytes() == again.dx.tobytes()


def test_a_failure_in_another_thread_reaches_the_caller():
    import threading

    caller = threading.get_ident()
    started = threading.Event()

    def broken(cursor, summed, items, index):
        if threading.get_ident() == caller:
            assert index == 0
            started.wait(10)
            return False
        assert index > 0
        started.set()
        raise MemoryError("no memory in a worker")

    with pytest.raises(MemoryError, match="worker"):
        pool.parallel(broken, (), 2, 2, 2)


@pytest.mark.parametrize("n", [0, -1])
def test_set_num_threads_refuses_less_than_one(n):
    with pytest.raises(backnorm.ArgumentValueError, match="n: must be 1 or more"):
        backnorm.set_num_threads(n)


@pytest.mark.parametrize("n", [1.0, "2", True, None])
def test_set_num_threads_refuses_what_is_not_an_integer(n):
    with pytest.raises(backnorm.ArgumentTypeError, match="n: must be an integer"):
        backnorm.set_num_threads(n)


def test_more_threads_than_processors_are_capped():
    before = backnorm.get_num_threads()
    try:
        backnorm.set_num_threads(10**6)
        assert backnorm.get_num_threads() == machine.detect().threads
        backnorm.set_num_threads(np.int64(1))
        assert backnorm.get_num_threads() == 1
    finally:
        backnorm.set_num_threads(before)


@pytest.mark.parametrize("text", ["0", "-3", "two", "1.5", ""])
def test_a_bad_thread_variable_is_an_error(monkeypatch, text):
    monkeypatch.setenv("BACKNORM_NUM_THREADS", text)
    monkeypatch.setattr(threads, "_threads", None)
    with pytest.raises(backnorm.ArgumentValueError, match="BACKNORM_NUM_THREADS"):
        backnorm.get_num_threads()


def test_the_thread_variable_is_the_start_value(monkeypatch):
    monkeypatch.setenv("BACKNORM_NUM_THREADS", "1")
    monkeypatch.setattr(threads, "_threads", None)
    assert backnorm.get_num_threads() == 1
