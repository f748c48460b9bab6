"""Calls that come back unfinished, so that Python sees to signals, and are entered again."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.executable import forget
from backnorm.machine import Machine
from backnorm_kernels import stage
from tests.support import internals

_MIB = 1 << 20
_MACHINES = (
    Machine(1, 1024 * _MIB, 1024 * _MIB, "one thread, large caches"),
    Machine(2, 0, 0, "two threads, no caches"),
    Machine(2, 1024 * _MIB, 1024 * _MIB, "two threads, large caches"),
)


@pytest.fixture
def entries(monkeypatch):
    """Let no participant claim a second item; return a list of the results of native calls."""
    run, ended = stage.runner(), []

    def counted(record, header):
        ended.append(run(record, header))
        return ended[-1]

    internals.leave_calls_early(monkeypatch, lambda: counted)
    forget()
    yield ended
    forget()


@pytest.fixture(params=_MACHINES, ids=lambda machine: machine.name)
def planned_for(request, monkeypatch):
    """Plan for a made-up machine; returns it."""
    internals.plan_for(monkeypatch, request.param)
    return request.param


def _bits(x, dy, data_format):
    normalized = backnorm.batch_norm_forward(x, epsilon=1e-5, data_format=data_format)
    mean, variance = normalized.mean, normalized.variance
    gradients = backnorm.batch_norm_backward(
        x, dy, mean, variance, epsilon=1e-5, data_format=data_format
    )
    y = backnorm.batch_norm_inference(x, mean, variance, epsilon=1e-5, data_format=data_format)
    return [array.tobytes() for array in (*normalized, *gradients, y)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("shape", "data_format"), [((24, 40, 30, 30), "NCX"), ((24, 30, 30, 40), "NXC")]
)
def test_calls_left_early_and_reentered_have_same_bits(
    entries, planned_for, rng, shape, data_format, dtype, monkeypatch
):
    x = rng.standard_normal(shape).astype(dtype)
    dy = rng.standard_normal(shape).astype(dtype) * x
    unfinished = _bits(x, dy, data_format)
    if planned_for.threads > 1:
        assert entries.count(0) >= 3
    assert entries.count(1) == 3
    monkeypatch.undo()
    forget()
    assert _bits(x, dy, data_format) == unfinished


def test_backward_after_exception_between_entries_has_same_bits(entries, monkeypatch, rng):
    internals.plan_for(monkeypatch, _MACHINES[1])
    forget()
    x = rng.standard_normal((24, 40, 30, 30), dtype=np.float32)
    dy = rng.standard_normal(x.shape, dtype=np.float32) * x
    mean, variance = x.mean((0, 2, 3)), x.var((0, 2, 3))
    run = stage.runner()

    def interrupted(record, header):
        if run(record, header) == 0 and len(entries) == 2:
            raise KeyboardInterrupt
        return entries[-1]

    monkeypatch.setattr(stage, "runner", lambda: interrupted)
    with pytest.raises(KeyboardInterrupt):
        backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-5)
    got = backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-5)
    monkeypatch.undo()
    forget()
    want = backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-5)
    assert got.dx.tobytes() == want.dx.tobytes()


def test_signal_during_long_call_raises_before_call_ends(drive):
    drive("long_call")
