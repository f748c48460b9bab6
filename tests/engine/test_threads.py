"""The pool, in the situations that end other threading layers. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

import backnorm
from backnorm import machine, threads
from backnorm.cpu import threads as pool
from backnorm.cpu.kinds import Kind
from backnorm.cpu.record import ADDRESSES
from backnorm.cpu.stage import Stage

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


def test_a_failure_in_another_thread_reaches_the_caller(monkeypatch):
    caller = threading.get_ident()
    started = threading.Event()

    def broken(record, index):
        if threading.get_ident() == caller:
            assert index == 0
            started.wait(10)
            # Others are at work on the last items.
            return 0
        assert index > 0
        started.set()
        raise MemoryError("no memory in a worker")

    numbers = {"size": 0, "share": 1}
    stage = Stage(
        Kind("floor", "float64", "move"), numbers, channels=0, partial=0, own=8, participants=2
    )
    monkeypatch.setattr("backnorm.cpu.library.function", lambda kind: broken)
    with pytest.raises(MemoryError, match="worker"):
        stage([0] * len(ADDRESSES))


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
