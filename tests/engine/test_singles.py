"""Float32 for elements of 16 bits: what it may not be used for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import backnorm
from backnorm.conformance import judge
from backnorm.conformance.data import realistic_data
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.executable import executable
from backnorm.problem import problem_of

LAYOUTS = {"NCX": (6, 5, 100), "NXC": (6, 100, 5)}


def assert_passed(verdicts):
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []


@pytest.fixture(params=LAYOUTS)
def data(request, rng):
    """Gradients and elements of bfloat16, statistics of float32."""
    shape = LAYOUTS[request.param]
    return realistic_data(
        shape, BFLOAT16, data_format=request.param, rng=rng, ratio=4.0, statistics_dtype=FLOAT32
    )


def backward(data):
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    assert_passed(judge.check_backward(*data.backward_inputs, gradients, **data.options))
    return gradients


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("data_format", LAYOUTS)
def test_a_mean_of_float64_is_not_rounded(dtype, data_format, rng):
    data = realistic_data(
        LAYOUTS[data_format], dtype, data_format=data_format, rng=rng, statistics_dtype=FLOAT32
    )
    # Every x is so near the mean that float32 would take it for the mean.
    data.x[...] = dtype.type(3.0)
    parameters = [np.float64(array) for array in (data.mean, data.variance, data.gamma)]
    parameters[0][...] = 3.0 + 2.0**-30
    x, dy, *channels = data.backward_inputs
    problem = problem_of("backward", x, dy, None, *channels, **data.options)
    problem = dataclasses.replace(problem, statistics_dtype=FLOAT64)
    found = executable(problem, x).run(x, dy, None, *parameters)
    gradients = backnorm.Gradients(*found[:3])
    assert np.all(gradients.dgamma != 0)
    assert_passed(judge.check_backward(data.x, data.dy, *parameters, gradients, **data.options))


def test_products_beyond_float32_are_summed(data):
    data.x[...] = (data.x.astype(float) * 2.0**70).astype(BFLOAT16)
    data.mean[...], data.variance[...] = data.mean * 2.0**70, 1e38
    data.dy[...] = (data.dy.astype(float) * 2.0**70).astype(BFLOAT16)
    assert np.isfinite(backward(data).dgamma).all()


def test_products_that_underflow_are_summed(data):
    data.dy[...] = (data.dy.astype(float) * 2.0**-120).astype(BFLOAT16)
    data.x[...] = (data.x.astype(float) * 2.0**-40).astype(BFLOAT16)
    data.mean[...], data.variance[...] = data.mean * 2.0**-40, 0.0
    data.gamma[...] = 2.0**100
    options = {**data.options, "epsilon": 2.0**-80}
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, **options)
    assert np.all(gradients.dgamma != 0)
    assert_passed(judge.check_backward(*data.backward_inputs, gradients, **options))


def test_intermediate_results_beyond_float32_do_no_harm(data):
    # A difference of 2^128 and more, times a gain that brings it back.
    limit = float.fromhex("0x1.fep127")
    data.dy[...] = (np.sign(data.dy.astype(float)) * limit).astype(BFLOAT16)
    data.gamma[...] = 2.0**-20
    assert np.isfinite(backward(data).dx.astype(float)).all()


def test_subnormal_outputs_are_rounded_once(data):
    data.dy[...] = (data.dy.astype(float) * 2.0**-30).astype(BFLOAT16)
    data.gamma[...] = (1 + 2.0**-18) * 2.0**-100
    backward(data)
    gradients = backnorm.batch_norm_backward(*data.backward_inputs, training=False, **data.options)
    assert_passed(
        judge.check_backward(*data.backward_inputs, gradients, training=False, **data.options)
    )


def test_gradients_of_zero_leave_zero(data):
    data.dy[...] = 0
    for gradient in backward(data):
        np.testing.assert_array_equal(gradient.astype(float), 0.0)


def test_nan_stays_in_its_channel(data):
    at = (slice(None), 2) if data.data_format == "NCX" else (..., 2)
    expected = backward(data)
    data.dy[at][0, 0] = np.nan
    gradients = backward(data)
    lost = np.zeros(data.x.shape, bool)
    lost[at] = True
    np.testing.assert_array_equal(np.isnan(gradients.dx.astype(float)), lost)
    np.testing.assert_array_equal(
        gradients.dx[~lost].view(np.uint16), expected.dx[~lost].view(np.uint16)
    )


def test_forward_with_a_mean_far_beyond_the_deviation(data):
    data.x[...] = (1000 + 8 * np.sign(data.x.astype(float) - data.x.astype(float).mean())).astype(
        BFLOAT16
    )
    data.x.reshape(-1)[:7] = BFLOAT16.type(1016)
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **data.options)
    assert_passed(judge.check_forward(data.x, data.gamma, data.beta, normalized, **data.options))
