"""Float32 arithmetic at the limits of its range and precision."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

import backnorm
from backnorm.conformance import judge
from backnorm.conformance.data import realistic_data
from backnorm.executable import run
from backnorm.problem import problem_of
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

LAYOUTS = {"NCX": (6, 5, 100), "NXC": (6, 100, 5)}


def assert_passed(verdicts):
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []


@pytest.fixture(params=itertools.product(LAYOUTS, (BFLOAT16, FLOAT32)), ids=str)
def data(request, rng):
    """Gradients and elements of bfloat16 or float32, statistics of float32."""
    data_format, dtype = request.param
    return realistic_data(
        LAYOUTS[data_format], dtype, data_format=data_format, rng=rng, ratio=4.0,
        statistics_dtype=FLOAT32,
    )  # fmt: skip


def computed(data, **options):
    """Return the gradients in float32 arithmetic, judged."""
    options = {**data.options, "arithmetic": "float32", **options}
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, **options)
    assert_passed(judge.check_backward(*data.backward_inputs, gradients, **options))
    return gradients


def scaled(array, factor):
    """Return an array of the same type with its elements multiplied."""
    return (array.astype(float) * factor).astype(array.dtype)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32], ids=str)
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_backward_in_float32_does_not_round_float64_mean(dtype, data_format, rng):
    data = realistic_data(
        LAYOUTS[data_format], dtype, data_format=data_format, rng=rng, statistics_dtype=FLOAT32
    )
    # Every x is so near the mean that float32 would take it for the mean.
    data.x[...] = dtype.type(3.0)
    parameters = [np.float64(array) for array in (data.mean, data.variance, data.gamma)]
    parameters[0][...] = 3.0 + 2.0**-30
    x, dy, *channels = data.backward_inputs
    settings = {**data.options, "arithmetic": "float32"}
    problem = problem_of("backward", x, dy, None, *channels, **settings)
    problem = dataclasses.replace(problem, statistics_dtype=FLOAT64)
    found = run(problem, (x, dy, None, *parameters))
    gradients = backnorm.Gradients(*found[:3])
    assert np.all(gradients.dgamma != 0)
    assert_passed(judge.check_backward(data.x, data.dy, *parameters, gradients, **settings))


def test_backward_in_float32_sums_products_beyond_float32_range(data):
    data.x[...] = scaled(data.x, 2.0**70)
    data.mean[...], data.variance[...] = data.mean * 2.0**70, 1e38
    data.dy[...] = scaled(data.dy, 2.0**70)
    assert np.isfinite(computed(data).dgamma).all()


def test_backward_in_float32_sums_products_that_underflow(data):
    data.dy[...] = scaled(data.dy, 2.0**-120)
    data.x[...] = scaled(data.x, 2.0**-40)
    data.mean[...], data.variance[...] = data.mean * 2.0**-40, 0.0
    data.gamma[...] = 2.0**100
    assert np.all(computed(data, epsilon=2.0**-80).dgamma != 0)


def test_backward_in_float32_with_intermediate_overflow_returns_finite_dx(data):
    # A difference of 2^128 and more, times a gain that brings it back.
    limit = float.fromhex("0x1.fep127")
    data.dy[...] = (np.sign(data.dy.astype(float)) * limit).astype(data.dy.dtype)
    data.gamma[...] = 2.0**-20
    assert np.isfinite(computed(data).dx.astype(float)).all()


def test_backward_in_float32_with_subnormal_outputs_passes_judge(data):
    data.dy[...] = scaled(data.dy, 2.0**-30)
    data.gamma[...] = (1 + 2.0**-18) * 2.0**-100
    computed(data)
    computed(data, training=False)


def test_backward_in_float32_with_zero_dy_returns_zeros(data):
    data.dy[...] = 0
    for gradient in computed(data):
        np.testing.assert_array_equal(gradient.astype(float), 0.0)


def test_backward_in_float32_with_cancelling_dy_returns_nonzero_dgamma(data):
    """Sums of dy are zero, products underflow, and one channel of five has no gradients."""
    data.x[...] = scaled(data.x, 2.0**-40)
    channels = np.moveaxis(data.dy, 1 if data.data_format == "NCX" else 2, 0)
    channels[...] = np.resize([2.0**-120, -(2.0**-120)], (6, 100))
    channels[1] = 0
    data.mean[...], data.variance[...] = data.mean * 2.0**-40, 0.0
    data.gamma[...] = 2.0**100
    gradients = computed(data, epsilon=2.0**-80)
    np.testing.assert_array_equal(gradients.dgamma != 0, [True, False, True, True, True])


def test_backward_in_float32_with_zero_dy_and_infinite_x_returns_nan(data):
    data.dy[...] = 0
    data.x[0, 0] = np.inf
    assert np.isnan(computed(data).dgamma).any()


def test_backward_in_float32_keeps_nan_in_its_channel(data):
    at = (slice(None), 2) if data.data_format == "NCX" else (..., 2)
    expected = computed(data)
    data.dy[at][0, 0] = np.nan
    gradients = computed(data)
    lost = np.zeros(data.x.shape, bool)
    lost[at] = True
    np.testing.assert_array_equal(np.isnan(gradients.dx.astype(float)), lost)
    bits = np.dtype(f"u{data.x.itemsize}")
    np.testing.assert_array_equal(gradients.dx[~lost].view(bits), expected.dx[~lost].view(bits))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("dtype", [FLOAT16, FLOAT32], ids=str)
def test_reduce_in_float32_with_infinite_mean_in_joined_rows_matches_float64(dtype, rows, rng):
    """Thirteen channels lie twice in a row of 26 columns; of an odd number of rows one is left."""
    x = rng.normal(size=(rows, 13)).astype(dtype)
    dy = np.abs(x) + dtype.type(1)
    mean = rng.normal(size=13).astype(FLOAT32)
    mean[1] = np.inf
    found = [backnorm.reduce(x, dy, mean, arithmetic=each) for each in ("float32", "float64")]
    assert np.isinf(found[1].sum_dy_xmu[1])
    np.testing.assert_allclose(found[0].sum_dy_xmu, found[1].sum_dy_xmu, 1e-4, 1e-5)
    np.testing.assert_array_equal(np.isfinite(found[0].sum_dy_xmu), np.isfinite(mean))


def test_forward_in_float32_with_mean_far_beyond_deviation_passes_judge(data):
    wide = data.x.astype(float)
    data.x[...] = (1000 + 8 * np.sign(wide - wide.mean())).astype(data.x.dtype)
    data.x.reshape(-1)[:7] = data.x.dtype.type(1016)
    settings = {**data.options, "arithmetic": "float32"}
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **settings)
    assert_passed(judge.check_forward(data.x, data.gamma, data.beta, normalized, **settings))


@pytest.mark.parametrize("far", [2.0**-140, 2.0**-126])
def test_inference_in_float32_with_tiny_beta_passes_judge(data, far):
    """A y that is nearly zero loses nothing to underflow."""
    data.x[...] = scaled(data.x, 2.0**-100)
    data.mean[...], data.variance[...], data.gamma[...] = data.mean * 2.0**-100, 0.0, far / 4
    data.beta[...] = -far * np.linspace(0.2, 3.0, data.beta.size)
    known = (data.mean, data.variance, data.gamma, data.beta)
    settings = {**data.options, "epsilon": 2.0**-200, "arithmetic": "float32"}
    y = backnorm.batch_norm_inference(data.x, *known, **settings)
    assert_passed(judge.check_inference(data.x, *known, y, **settings))


@pytest.mark.parametrize("data_format", LAYOUTS)
@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
def test_backward_of_float32_elements_differs_between_arithmetics(data_format, ratio, rng):
    data = realistic_data(
        LAYOUTS[data_format], FLOAT32, data_format=data_format, rng=rng, ratio=ratio
    )
    exact = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    assert np.any(computed(data).dx != exact.dx)
