"""Limits of the number of threads of a call."""

from __future__ import annotations

import threading as python_threads

import numpy as np
import pytest

import backnorm
from backnorm import machine, threads
from tests.support import internals


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    monkeypatch.delenv("BACKNORM_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delitem(threads.modules, "torch", raising=False)
    internals.forget_number_of_threads(monkeypatch)


@pytest.mark.parametrize("n", [0, -1])
@pytest.mark.parametrize("setting", [backnorm.set_num_threads, backnorm.num_threads])
def test_limit_below_one_is_rejected(setting, n):
    with pytest.raises(backnorm.ArgumentValueError, match="n: must be 1 or more"), setting(n):
        pass


@pytest.mark.parametrize("n", [1.0, "2", True, None])
@pytest.mark.parametrize("setting", [backnorm.set_num_threads, backnorm.num_threads])
def test_limit_rejects_other_types_than_integers(setting, n):
    with pytest.raises(backnorm.ArgumentTypeError, match="n: must be an integer"), setting(n):
        pass


def test_set_num_threads_above_processors_is_capped():
    backnorm.set_num_threads(10**6)
    assert backnorm.get_num_threads() == machine.processors()
    backnorm.set_num_threads(np.int64(1))
    assert backnorm.get_num_threads() == 1


@pytest.mark.parametrize("text", ["0", "-3", "two", "1.5", ""])
def test_backnorm_num_threads_variable_with_invalid_text_raises_error(monkeypatch, text):
    monkeypatch.setenv("BACKNORM_NUM_THREADS", text)
    with pytest.raises(backnorm.ArgumentValueError, match="BACKNORM_NUM_THREADS"):
        backnorm.get_num_threads()


@pytest.mark.parametrize(
    ("ours", "openmp", "expected"),
    [("1", None, 1), (None, "1", 1), (None, "1,4", 1), (None, "many", None), ("1", "2", 1)],
)
def test_thread_variables_set_initial_number_of_threads(monkeypatch, ours, openmp, expected):
    for name, text in (("BACKNORM_NUM_THREADS", ours), ("OMP_NUM_THREADS", openmp)):
        if text is not None:
            monkeypatch.setenv(name, text)
    assert backnorm.get_num_threads() == (expected or machine.processors())


def test_get_num_threads_caches_processors_until_recount(monkeypatch):
    monkeypatch.setattr(machine, "processors", lambda: 7)
    assert backnorm.get_num_threads() == 7
    monkeypatch.setattr(machine, "processors", lambda: 5)
    assert backnorm.get_num_threads() == 7
    internals.count_processors_again(monkeypatch)
    assert backnorm.get_num_threads() == 5


def test_num_threads_block_limits_only_its_scope_and_thread(monkeypatch):
    monkeypatch.setattr(machine, "processors", lambda: 8)
    elsewhere = []

    def look():
        elsewhere.append(backnorm.get_num_threads())

    with backnorm.num_threads(4):
        assert backnorm.get_num_threads() == 4
        with backnorm.num_threads(2):
            assert backnorm.get_num_threads() == 2
        with backnorm.num_threads(6):
            assert backnorm.get_num_threads() == 4
        other = python_threads.Thread(target=look)
        other.start()
        other.join()
    assert backnorm.get_num_threads() == 8
    assert elsewhere == [8]
    with pytest.raises(KeyError), backnorm.num_threads(1):
        raise KeyError
    assert backnorm.get_num_threads() == 8


def test_get_num_threads_follows_imported_pytorch(monkeypatch):
    class Torch:
        @staticmethod
        def get_num_threads():
            return 3

    monkeypatch.setattr(machine, "processors", lambda: 8)
    monkeypatch.setitem(threads.modules, "torch", Torch())
    assert backnorm.get_num_threads() == 3
    with backnorm.num_threads(2):
        assert backnorm.get_num_threads() == 2
    # A module that is still being imported has no get_num_threads.
    monkeypatch.setitem(threads.modules, "torch", object())
    assert backnorm.get_num_threads() == 8
