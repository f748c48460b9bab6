"""The same bits on every run, for any number of threads, and from several Python threads."""

from __future__ import annotations

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

# Large enough to be worth several threads, in each of the ways the work can be cut.
PROBLEMS = [
    ("NCX", (16, 8, 40, 40), FLOAT32, "float64"),
    ("NCX", (64, 64, 7, 7), FLOAT32, "float32"),
    ("NCX", (2, 3, 30000), FLOAT64, "float64"),
    ("NXC", (16, 40, 40, 8), FLOAT32, "float64"),
    ("NXC", (8, 7, 7, 512), BFLOAT16, "float32"),
    ("NXC", (60000, 3), FLOAT16, "float32"),
    ("NXC", (4099, 24), FLOAT16, "float64"),
]


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch):
    """Let this machine pass for one with eight processors; restore the setting afterwards."""
    machine = dataclasses.replace(backnorm.machine.detect(), threads=8)
    monkeypatch.setattr("backnorm.machine.detect", lambda: machine)
    monkeypatch.setattr("backnorm.machine.processors", lambda: 8)
    # Another test may have imported PyTorch, which has its own number.
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    before = backnorm.get_num_threads()
    yield
    monkeypatch.undo()
    backnorm.set_num_threads(before)


def results(data, arithmetic):
    options = {**data.options, "arithmetic": arithmetic}
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, **options)
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **options)
    statistics = data.mean, data.variance
    y = backnorm.batch_norm_inference(data.x, *statistics, data.gamma, data.beta, **options)
    settings = {"data_format": data.data_format, "arithmetic": arithmetic}
    sums = backnorm.reduce(data.x, data.dy, data.mean, **settings)
    dx = backnorm.apply(*data.backward_inputs, sums, **options)
    arrays = [*gradients, *normalized, y, sums.sum_dy, sums.sum_dy_xmu, dx]
    return [array.tobytes() for array in arrays]


@pytest.mark.parametrize(("data_format", "shape", "dtype", "arithmetic"), PROBLEMS, ids=str)
def test_number_of_threads_does_not_change_bits(data_format, shape, dtype, arithmetic, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=10.0)
    backnorm.set_num_threads(1)
    alone = results(data, arithmetic)
    for count in (2, 3, 8):
        backnorm.set_num_threads(count)
        assert backnorm.get_num_threads() == count
        for _ in range(3):
            assert results(data, arithmetic) == alone


def test_concurrent_python_threads_get_the_bits_of_serial_calls(rng):
    cases = [
        (realistic_data(shape, dtype, data_format=data_format, rng=rng), arithmetic)
        for data_format, shape, dtype, arithmetic in PROBLEMS[:4]
    ]
    expected = [results(*case) for case in cases]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(results, *zip(*cases * 6, strict=True)))
    assert found == expected * 6


def test_backward_results_do_not_depend_on_offset_of_arrays(rng):
    data = realistic_data((8, 5, 33, 3), FLOAT32, rng=rng)
    plain = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    for offset in (1, 3, 8, 13):
        x, dy, out = (
            np.zeros(data.x.size + offset, np.float32)[offset:].reshape(data.x.shape)
            for _ in range(3)
        )
        x[...], dy[...] = data.x, data.dy
        moved = backnorm.batch_norm_backward(
            x, dy, *data.backward_inputs[2:], **data.options, out=out
        )
        for actual, expected in zip(moved, plain, strict=True):
            np.testing.assert_array_equal(actual, expected)


def test_set_num_threads_accepts_counts_from_one():
    for count in (1, 2, 8, 1000):
        backnorm.set_num_threads(count)
        assert 1 <= backnorm.get_num_threads() <= count
    backnorm.set_num_threads(1)
    assert backnorm.get_num_threads() == 1


@pytest.mark.parametrize("count", [0, -1])
def test_set_num_threads_below_one_raises_value_error(count):
    with pytest.raises(ValueError, match="n: must be 1 or more"):
        backnorm.set_num_threads(count)
