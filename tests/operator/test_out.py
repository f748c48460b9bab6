"""`out=`: where results go, which arrays are refused, and what in-place means."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32

LAYOUTS = [("NCX", (4, 9, 5, 3)), ("NXC", (4, 5, 3, 9)), ("NCX", (3, 40, 2)), ("NXC", (70, 24))]


def backward(data, **keywords):
    return backnorm.batch_norm_backward(*data.backward_inputs, **data.options, **keywords)


def test_backward_writes_all_elements_of_outputs(poisoned_allocations, rng):
    data = realistic_data((5, 7, 11), FLOAT32, rng=rng)
    gradients = backward(data)
    assert not any(np.isnan(values).any() for values in gradients)
    assert len(poisoned_allocations) >= 3
    for values in gradients:
        assert any(np.shares_memory(values, array) for array in poisoned_allocations)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_out_is_returned_with_results_of_call_without_out(
    dtype, data_format, shape, training, poison, rng
):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    plain = backward(data, training=training)
    out = poison(np.empty(shape, dtype))
    gradients = backward(data, training=training, out=out)
    assert gradients.dx is out
    for actual, expected in zip(gradients, plain, strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_out_that_is_dy_receives_dx(dtype, data_format, shape, training, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    plain = backward(data, training=training)
    gradients = backward(data, training=training, out=data.dy)
    assert gradients.dx is data.dy
    for actual, expected in zip(gradients, plain, strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


def strided(shape, dtype):
    return np.full((*shape[:-1], 2 * shape[-1]), np.nan, dtype)[..., ::2]


def reversed_rows(shape, dtype):
    return np.full(shape, np.nan, dtype)[::-1]


def fortran(shape, dtype):
    return np.full(shape, np.nan, dtype, order="F")


def byte_swapped(shape, dtype):
    return np.full(shape, np.nan, dtype).astype(dtype.newbyteorder())


def misaligned(shape, dtype):
    count = int(np.prod(shape))
    out = np.zeros(count * dtype.itemsize + 1, np.uint8)[1:].view(dtype).reshape(shape)
    out.fill(np.nan)
    return out


@pytest.mark.parametrize("make", [strided, reversed_rows, fortran, byte_swapped, misaligned])
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
def test_out_strided_misaligned_or_byte_swapped_receives_dx(make, data_format, shape, rng):
    data = realistic_data(shape, FLOAT32, data_format=data_format, rng=rng)
    plain = backward(data)
    out = make(shape, FLOAT32)
    assert backward(data, out=out).dx is out
    np.testing.assert_array_equal(out, plain.dx)


@pytest.mark.parametrize("make", [strided, reversed_rows, fortran])
def test_out_that_is_dy_with_other_strides_receives_dx(make, rng):
    data = realistic_data((4, 6, 8), FLOAT32, rng=rng)
    plain = backward(data)
    dy = make(data.dy.shape, FLOAT32)
    dy[...] = data.dy
    gradients = backnorm.batch_norm_backward(
        data.x, dy, data.mean, data.variance, data.gamma, **data.options, out=dy
    )
    assert gradients.dx is dy
    np.testing.assert_array_equal(dy, plain.dx)


def test_strided_out_keeps_gaps_unchanged(rng):
    data = realistic_data((3, 4, 10), FLOAT32, rng=rng)
    memory = np.full((3, 4, 20), 7.0, np.float32)
    backward(data, out=memory[..., ::2])
    np.testing.assert_array_equal(memory[..., 1::2], 7.0)


@pytest.fixture
def data(rng):
    return realistic_data((4, 4, 6), FLOAT32, rng=rng)


def test_out_whose_elements_share_memory_is_rejected(data):
    out = np.lib.stride_tricks.as_strided(
        np.zeros(24, np.float32), shape=(4, 4, 6), strides=(0, 24, 4)
    )
    with pytest.raises(backnorm.ArgumentValueError, match=r"^out: .*share memory"):
        backward(data, out=out)


@pytest.mark.parametrize("shape", [(0, 4, 5), (3, 4, 0), (3, 0, 5)], ids=str)
def test_out_that_is_empty_is_returned_as_dx(shape):
    x, statistics = np.empty(shape, np.float32), np.ones(shape[1], np.float32)
    out = np.empty_like(x)
    gradients = backnorm.batch_norm_backward(x, x, statistics, statistics, epsilon=1e-5, out=out)
    assert gradients.dx is out


def test_out_that_partly_overlaps_dy_is_rejected(rng):
    source = realistic_data((4, 4, 6), FLOAT32, rng=rng)
    memory = np.zeros((5, 4, 6), np.float32)
    memory[:4] = source.dy
    arguments = (source.x, memory[:4], source.mean, source.variance, source.gamma)
    with pytest.raises(ValueError, match=r"out.*overlaps.*dy"):
        backnorm.batch_norm_backward(*arguments, **source.options, out=memory[1:])


def test_out_interleaved_with_dy_receives_dx_and_keeps_dy(rng):
    source = realistic_data((4, 4, 6), FLOAT32, rng=rng)
    memory = np.zeros((4, 4, 12), np.float32)
    memory[..., ::2] = source.dy
    arguments = (source.x, memory[..., ::2], source.mean, source.variance, source.gamma)
    gradients = backnorm.batch_norm_backward(*arguments, **source.options, out=memory[..., 1::2])
    np.testing.assert_array_equal(gradients.dx, backward(source).dx)
    np.testing.assert_array_equal(memory[..., ::2], source.dy)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_forward_and_inference_with_out_return_out_with_same_results(dtype, poison, rng):
    data = realistic_data((4, 6, 9), dtype, rng=rng)
    out = poison(np.empty(data.x.shape, dtype))
    plain = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **data.options)
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **data.options, out=out)
    assert normalized.y is out
    np.testing.assert_array_equal(out, plain.y)

    inputs = (data.x, data.mean, data.variance, data.gamma, data.beta)
    plain = backnorm.batch_norm_inference(*inputs, **data.options)
    poison(out)
    assert backnorm.batch_norm_inference(*inputs, **data.options, out=out) is out
    np.testing.assert_array_equal(out, plain)


def forward(data, x, **keywords):
    return backnorm.batch_norm_forward(x, data.gamma, data.beta, **data.options, **keywords)


def inference(data, x, **keywords):
    inputs = (x, data.mean, data.variance, data.gamma, data.beta)
    return (backnorm.batch_norm_inference(*inputs, **data.options, **keywords),)


def apply_forward(data, x, **keywords):
    moments = backnorm.reduce_forward(x, data_format=data.data_format)
    inputs = (x, moments, data.gamma, data.beta)
    return backnorm.apply_forward(*inputs, **data.options, **keywords)


NORMALISATIONS = [forward, inference, apply_forward]


@pytest.mark.parametrize("call", NORMALISATIONS)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("with_relu", [True, False])
def test_out_that_is_x_receives_y(call, dtype, data_format, shape, with_relu, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    relu = {"activation": "relu", "residual": data.dy} if with_relu else {}
    plain = call(data, data.x, **relu)
    x = data.x.copy()
    results = call(data, x, out=x, **relu)
    assert results[0] is x
    for actual, expected in zip(results[:3], plain[:3], strict=True):
        np.testing.assert_array_equal(actual, expected, strict=True)


@pytest.mark.parametrize("call", NORMALISATIONS)
@pytest.mark.parametrize("make", [strided, reversed_rows, fortran, byte_swapped, misaligned])
def test_out_that_is_x_of_any_memory_layout_receives_y(call, make, rng):
    data = realistic_data((4, 6, 8), FLOAT32, rng=rng)
    x = make(data.x.shape, FLOAT32)
    x[...] = data.x
    plain = call(data, x)[0].copy()
    assert call(data, x, out=x)[0] is x
    np.testing.assert_array_equal(x, plain)


def test_forward_in_place_raises_error_of_variance_after_y_is_written(data):
    x = data.x.copy()
    x[:, 1] = 3.0
    expected = x.copy()
    with pytest.raises(ValueError, match="not in channel 1"):
        backnorm.batch_norm_forward(x, epsilon=0.0, out=x)
    assert not np.array_equal(x, expected)


@pytest.mark.parametrize("call", NORMALISATIONS)
def test_out_that_is_reversed_x_or_residual_is_rejected(call, data):
    before = data.x.copy(), data.dy.copy()
    with pytest.raises(ValueError, match=r"out: overlaps part of x .*or exactly the memory of x"):
        call(data, data.x, out=data.x[::-1])
    with pytest.raises(ValueError, match="out: overlaps residual"):
        call(data, data.x, out=data.dy, activation="relu", residual=data.dy)
    np.testing.assert_array_equal(data.x, before[0])
    np.testing.assert_array_equal(data.dy, before[1])
