"""The engine of NumPy: its bits and its memory."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import BFLOAT16, ELEMENT_TYPES, FLOAT16, FLOAT32, FLOAT64

# Spans that end in a row and beyond it, blocks of some channels, many rows, one element.
SHAPES = [(5, 3, 700), (2, 70, 1030), (1100, 5), (9, 4, 11, 31), (3, 1, 2049), (1, 6, 1), (0, 3, 4)]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def engine():
    with backnorm.engine("numpy"):
        yield


def last(array):
    """Return an array whose channel axis is the last, contiguous."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def bits(*arrays):
    return [np.ascontiguousarray(each).view(np.uint8).tobytes() for each in arrays]


def results(data, data_format="NCX"):
    """Return the results of every operation on one batch, those of x's shape first."""
    x, dy, mean, variance, gamma = data.backward_inputs
    y, *moments = backnorm.batch_norm_forward(
        x, gamma, data.beta, epsilon=data.epsilon, data_format=data_format
    )
    dx, *gradients = backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, epsilon=data.epsilon, data_format=data_format
    )
    z = backnorm.batch_norm_inference(
        x, mean, variance, gamma, data.beta, epsilon=data.epsilon, data_format=data_format
    )
    sums = backnorm.reduce(x, dy, mean, data_format=data_format)
    parts = backnorm.reduce(x, dy, mean, reproducible=True, data_format=data_format)
    dx_of_sums = backnorm.apply(
        x, dy, mean, variance, gamma, sums, epsilon=data.epsilon, data_format=data_format
    )
    return [y, dx, z, dx_of_sums], [*moments, *gradients, sums.sum_dy, sums.sum_dy_xmu, parts.bins]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_have_same_bits_in_both_layouts_and_in_every_call(shape, dtype, rng):
    data = realistic_data(shape, dtype, rng=rng, ratio=10.0)
    elements, channels = results(data)
    again = results(data)
    assert bits(*elements, *channels) == bits(*again[0], *again[1])
    moved = dataclasses.replace(data, x=last(data.x), dy=last(data.dy))
    of_last, channels_of_last = results(moved, "NXC")
    assert bits(*map(last, elements)) == bits(*of_last)
    assert bits(*channels) == bits(*channels_of_last)


def test_results_have_same_bits_in_another_process(rng):
    code = """
import hashlib
import numpy as np
import backnorm
rng = np.random.default_rng(5)
x, dy = rng.standard_normal((2, 6, 33, 411))
with backnorm.engine("numpy"):
    y, mean, variance = backnorm.batch_norm_forward(x, epsilon=1e-5)
    found = backnorm.batch_norm_backward(x, dy, mean, variance, epsilon=1e-5)
    print(hashlib.sha256(b"".join(map(bytes, (y, mean, variance, *found)))).hexdigest())
"""
    found = [subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16], ids=str)
def test_results_in_place_of_operand_equal_those_in_new_memory(dtype, data_format, rng, read_only):
    data = realistic_data((7, 9, 13, 31), dtype, data_format=data_format, rng=rng, ratio=3.0)
    options = {"epsilon": 1e-5, "data_format": data_format}
    channels = read_only(data.mean, data.variance, data.gamma)
    x, dy = read_only(data.x, data.dy)
    expected = backnorm.batch_norm_backward(x, dy, *channels, **options)
    y, *moments = backnorm.batch_norm_forward(x, data.gamma, data.beta, **options)
    dy = data.dy.copy()
    found = backnorm.batch_norm_backward(x, dy, *channels, out=dy, **options)
    assert found.dx is dy
    assert bits(*found) == bits(*expected)
    x = data.x.copy()
    found = backnorm.batch_norm_forward(x, data.gamma, data.beta, out=x, **options)
    assert found[0] is x
    assert bits(*found) == bits(y, *moments)


@pytest.mark.covering(1)
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, FLOAT16], ids=str)
@pytest.mark.parametrize(
    ("data_format", "shape"),
    [("NCX", (8, 8, 128, 64)), ("NXC", (8, 128, 64, 8)), ("NCX", (1 << 19, 1))],
)
def test_peak_memory_beside_results_is_a_few_blocks(data_format, shape, dtype, reproducible, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    options = {"epsilon": 1e-5, "data_format": data_format, "reproducible": reproducible}
    residual = data.dy

    def both():
        normalized = backnorm.batch_norm_forward(
            data.x, data.gamma, data.beta, activation="relu", residual=residual, **options
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.reset_peak()
        x, dy, *channels = data.backward_inputs
        mask = normalized.mask
        backnorm.batch_norm_backward(x, dy, *channels, mask=mask, residual=True, **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        return normalized.y.nbytes

    peaks = []
    both()
    peaks.clear()
    tracemalloc.start()
    try:
        size = both()
    finally:
        tracemalloc.stop()
    # The memory of large results is not traced. Blocks are of 0.5 MiB.
    assert size >= 1 * MIB
    mask = -(-data.x.size // 8)
    assert max(peaks) < 3 * MIB + mask + (2 * size if size < 2 * MIB else 0), peaks


@pytest.mark.parametrize("reproducible", [False, True])
def test_peak_memory_of_many_channels_is_a_few_arrays_of_channels(reproducible, rng):
    data = realistic_data((2, 1 << 17), FLOAT32, rng=rng)
    options = {"epsilon": 1e-5, "reproducible": reproducible}
    tracemalloc.start()
    try:
        backnorm.batch_norm_backward(*data.backward_inputs, **options)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Arrays of float64; the results are two of them, and bins have eight integers for each channel.
    assert peak < 8 * len(data.mean) * (32 if reproducible else 16)
