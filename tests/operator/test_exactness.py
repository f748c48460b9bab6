"""The canonical operator against the oracle: each type, layout and kind of trouble."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import backnorm
from backnorm.conformance.battery import cases, examine
from backnorm.conformance.data import exact_data, realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from tests.support.battery import facets_of
from tests.support.dtypes import (
    ELEMENT_TYPES,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    is_16_bit,
    statistics_types,
)

BATTERY = {
    case.name: case for name in (None, "float32", "float64") for case in cases(arithmetic=name)
}
TYPES = [(dtype, other) for dtype in ELEMENT_TYPES for other in statistics_types(dtype)]
# Around the widths of vectors and the heights of tiles: below, at and beyond each.
SIZES = {
    "NCX": [(2, 3, 1), (3, 1, 7), (2, 9, 8), (1, 2, 65), (5, 33, 4), (130, 2, 3), (3, 17, 7, 7),
            (2, 3, 2, 3, 2, 3), (9, 5), (2, 2, 1030)],
    "NXC": [(2, 1, 3), (3, 7, 1), (2, 8, 9), (1, 65, 2), (5, 4, 33), (130, 3, 2), (3, 7, 7, 17),
            (2, 3, 2, 3, 2, 3), (9, 5), (2, 3, 257), (70, 31, 8)],
}  # fmt: skip
LAYOUTS = [(data_format, shape) for data_format, shapes in SIZES.items() for shape in shapes]


def assert_passed(verdicts):
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []


def check(data, *, training=True):
    gradients = backnorm.batch_norm_backward(
        *data.backward_inputs, training=training, **data.options
    )
    assert_passed(
        check_backward(*data.backward_inputs, gradients, training=training, **data.options)
    )
    return gradients


@pytest.mark.covering(2, facets={"name": facets_of})
@pytest.mark.parametrize("name", BATTERY)
def test_backward_passes_battery(name):
    case = BATTERY[name]
    operator = partial(backnorm.batch_norm_backward, arithmetic=case.arithmetic)
    assert_passed(examine(operator, case))


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
def test_backward_at_sizes_near_vectors_and_tiles_is_accurate(dtype, data_format, shape, rng):
    exact = exact_data(shape, dtype, data_format=data_format, rng=rng)
    gradients = backnorm.batch_norm_backward(*exact.backward_inputs, **exact.options)
    for actual, known in zip(gradients, (exact.dx, exact.dgamma, exact.dbeta), strict=True):
        np.testing.assert_array_equal(actual, known.astype(actual.dtype))
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=10.0)
    check(data)
    check(data, training=False)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("dtype", "statistics"), TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
def test_forward_and_inference_are_accurate_and_exact_for_exact_data(
    dtype, statistics, data_format, shape, rng
):
    layout = {"data_format": data_format, "rng": rng, "statistics_dtype": statistics}
    data = realistic_data(shape, dtype, ratio=10.0, **layout)
    parameters = (data.gamma, data.beta)
    normalized = backnorm.batch_norm_forward(data.x, *parameters, **data.options)
    assert_passed(check_forward(data.x, *parameters, normalized, **data.options))
    inputs = (data.x, data.mean, data.variance, *parameters)
    y = backnorm.batch_norm_inference(*inputs, **data.options)
    assert_passed(check_inference(*inputs, y, **data.options))

    exact = exact_data(shape, dtype, **layout)
    inputs = (exact.x, exact.mean, exact.variance, exact.gamma, exact.beta)
    y = backnorm.batch_norm_inference(*inputs, **exact.options)
    np.testing.assert_array_equal(y.astype(float), exact.y)
    if exact.true_statistics:
        normalized = backnorm.batch_norm_forward(exact.x, exact.gamma, exact.beta, **exact.options)
        np.testing.assert_array_equal(normalized.y.astype(float), exact.y)
        np.testing.assert_array_equal(normalized.mean, exact.mean)
        np.testing.assert_array_equal(normalized.variance, exact.variance)


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("ratio", [1e4, 1e6])
def test_backward_and_forward_with_mean_far_above_deviation_are_accurate(
    dtype, data_format, ratio, rng
):
    shape = (8, 5, 60) if data_format == "NCX" else (8, 60, 5)
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=ratio)
    check(data)
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **data.options)
    verdicts = check_forward(data.x, data.gamma, data.beta, normalized, **data.options)
    assert_passed(verdicts)
    if dtype == FLOAT32:
        assert verdicts["mean"].worst_ulp <= 1.0
        assert verdicts["variance"].worst_ulp <= 1.0


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_float16_sums_above_65504_do_not_overflow(data_format, rng):
    shape = (16, 4, 100) if data_format == "NCX" else (16, 100, 4)
    data = realistic_data(shape, FLOAT16, data_format=data_format, rng=rng, gradient_scale=2000.0)
    data.dy[...] = np.abs(data.dy)
    gradients = check(data)
    assert np.abs(gradients.dbeta).min() > 65504
    assert np.isfinite(gradients.dx.astype(float)).all()
    x = (np.abs(data.x.astype(float)) + 1000).astype(FLOAT16)
    normalized = backnorm.batch_norm_forward(x, data.gamma, data.beta, **data.options)
    assert_passed(check_forward(x, data.gamma, data.beta, normalized, **data.options))


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
def test_backward_and_forward_of_values_up_to_1e30_are_accurate(dtype, data_format, rng):
    shape = (4, 3, 30) if data_format == "NCX" else (4, 30, 3)
    layout = {"data_format": data_format, "rng": rng}
    gradients = check(realistic_data(shape, dtype, gradient_scale=1e30, **layout))
    assert all(np.isfinite(values).all() for values in gradients)
    # x of 1e18 has a variance of 1e36, and the sum of its squares is beyond float32.
    data = realistic_data(shape, dtype, scale=1e18, gradient_scale=1e30, **layout)
    check(data)
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **data.options)
    assert_passed(check_forward(data.x, data.gamma, data.beta, normalized, **data.options))
    # x of 1e30 that hardly varies: its mean is the sum of numbers whose squares overflow.
    x = np.full(shape, 1e30, dtype)
    ones = np.ones(3, dtype)
    normalized = backnorm.batch_norm_forward(x, ones, ones, epsilon=1e-5, data_format=data_format)
    np.testing.assert_array_equal(normalized.mean, ones * dtype.type(1e30))
    np.testing.assert_array_equal(normalized.variance, 0 * ones)
    np.testing.assert_array_equal(normalized.y, np.ones(shape))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e-43])
def test_backward_of_tiny_and_subnormal_dy_is_accurate(dtype, scale, rng):
    if dtype == FLOAT16:
        scale *= 1e37 if scale < 1e-40 else 1e33
    check(realistic_data((3, 4, 10), dtype, rng=rng, gradient_scale=scale))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (1, 4, 1, 1), (1, 1)])
def test_backward_with_one_element_per_channel_is_accurate_and_zero_at_mean(dtype, shape, rng):
    data = realistic_data(shape, dtype, rng=rng)
    check(data)
    check(data, training=False)
    gradients = backnorm.batch_norm_backward(
        data.x, data.dy, data.x.reshape(-1).astype(data.mean.dtype), *data.backward_inputs[3:],
        **data.options,
    )  # fmt: skip
    # At x = mean the one element has no freedom: dx and dgamma are exactly 0.
    np.testing.assert_array_equal(gradients.dx.astype(float), 0.0)
    np.testing.assert_array_equal(gradients.dgamma.astype(float), 0.0)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_backward_of_constant_channel_returns_finite_dx_and_zero_dgamma(dtype, rng):
    data = realistic_data((4, 3, 6), dtype, rng=rng)
    data.x[:, 1] = 3.0
    data.mean[1], data.variance[1] = 3.0, 0.0
    gradients = check(data)
    assert np.isfinite(gradients.dx.astype(float)).all()
    assert gradients.dgamma[1] == 0.0


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4), (0, 0), (0, 3)])
def test_operations_on_empty_tensors_return_empty_arrays_and_zeros(
    dtype, shape, poisoned_allocations
):
    other = np.float32 if is_16_bit(dtype) else dtype
    x, ones = np.zeros(shape, dtype), np.ones(shape[1], other)
    gradients = backnorm.batch_norm_backward(x, x, ones, ones, ones, epsilon=1e-5)
    assert gradients.dx.shape == shape
    for values in gradients[1:]:
        np.testing.assert_array_equal(values, np.zeros(shape[1], other), strict=True)
    assert backnorm.batch_norm_inference(x, ones, ones, ones, ones, epsilon=1e-5).shape == shape
    normalized = backnorm.batch_norm_forward(x, ones, ones, epsilon=1e-5)
    assert normalized.y.shape == shape
    np.testing.assert_array_equal(normalized.mean, np.zeros(shape[1], other), strict=True)
    np.testing.assert_array_equal(normalized.variance, np.zeros(shape[1], other), strict=True)


def test_backward_of_large_problem_is_accurate(rng):
    for data_format, shape in (("NCX", (20, 24, 30, 30)), ("NXC", (20, 30, 30, 24))):
        check(realistic_data(shape, FLOAT32, data_format=data_format, rng=rng, ratio=100.0))
