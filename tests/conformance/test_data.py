"""Exact data is exact, and no data has a constant gradient."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.data import exact_data, realistic_data
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64, statistics_types

TYPES = [(dtype, other) for dtype in ELEMENT_TYPES for other in statistics_types(dtype)]
SHAPES = [(4, 3, 5, 6), (2, 3), (3, 3, 3), (7, 5, 2), (64, 4, 33, 2), (1, 4), (0, 3, 2), (2, 0, 3)]


@pytest.mark.parametrize(("dtype", "statistics"), TYPES, ids=str)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("epsilon", [0.0, 2.0**-6])
def test_exact_data_results_equal_reference(dtype, statistics, data_format, shape, epsilon, rng):
    data = exact_data(
        shape,
        dtype,
        data_format=data_format,
        rng=rng,
        statistics_dtype=statistics,
        epsilon=epsilon,
    )
    exact = reference.backward(*data.backward_inputs, **data.options)
    y = reference.inference(
        data.x, data.mean, data.variance, data.gamma, data.beta, **data.options
    ).y
    for value, known in (
        (exact.dx, data.dx),
        (exact.dgamma, data.dgamma),
        (exact.dbeta, data.dbeta),
        (y, data.y),
    ):
        np.testing.assert_array_equal(value.hi, known)
        np.testing.assert_array_equal(value.lo, 0.0)
    for tensor in (data.dx, data.y):
        np.testing.assert_array_equal(tensor.astype(dtype).astype(float), tensor)
    if data.true_statistics:
        forward = reference.forward(data.x, data.gamma, data.beta, **data.options)
        np.testing.assert_array_equal(forward.mean.hi, data.mean.astype(float))
        np.testing.assert_array_equal(forward.variance.hi, data.variance.astype(float))
        np.testing.assert_array_equal(forward.y.hi, data.y)


def test_exact_data_sums_in_float32_are_exact_in_any_order(rng):
    data = exact_data((64, 3, 1024), FLOAT32, rng=rng, mean_magnitude=2**16)
    c = data.x - data.mean[:, None]
    products = np.moveaxis(data.dy * c, 1, 0).reshape(3, -1)
    gradients = np.moveaxis(data.dy, 1, 0).reshape(3, -1)
    for terms in (products, gradients):
        for _ in range(3):
            shuffled = rng.permutation(terms, axis=1)
            running = np.cumsum(shuffled, axis=1, dtype=np.float32)[:, -1]
            np.testing.assert_array_equal(running, terms.astype(float).sum(1))


def test_exact_data_with_large_means_is_exact(rng):
    data = exact_data((8, 4, 6), FLOAT32, rng=rng, mean_magnitude=2**20)
    assert np.abs(data.mean).max() > 2**16
    exact = reference.backward(*data.backward_inputs, **data.options)
    np.testing.assert_array_equal(exact.dx.hi, data.dx)


@pytest.mark.parametrize("make", [exact_data, realistic_data])
def test_data_of_each_channel_has_varying_dy_and_large_results(make, rng):
    data = make((16, 6, 20), FLOAT64, rng=rng)
    exact = reference.backward(*data.backward_inputs, **data.options)
    assert np.ptp(data.dy, axis=(0, 2)).min() > 1.0
    assert np.abs(exact.dx.hi).max(axis=(0, 2)).min() > 0.1
    assert np.abs(exact.dbeta.hi).min() > 0.0
    assert np.abs(exact.dgamma.hi).min() > 0.0


def test_realistic_data_has_the_given_ratio(rng):
    data = realistic_data((50, 4, 40), FLOAT64, rng=rng, ratio=1e4)
    ratio = np.abs(data.mean) / np.sqrt(data.variance)
    np.testing.assert_allclose(ratio, 1e4, rtol=0.1)


@pytest.mark.parametrize("make", [exact_data, realistic_data])
def test_data_is_deterministic_for_same_seed(make):
    one, other = (make((3, 4, 5), FLOAT32, rng=np.random.default_rng(5)) for _ in range(2))
    for left, right in zip(one.backward_inputs, other.backward_inputs, strict=True):
        np.testing.assert_array_equal(left, right)
