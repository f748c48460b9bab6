"""The oracle of the operators with a ReLU against mpmath, and the order of the bits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from backnorm import reference
from backnorm.activations import RELU
from backnorm.conformance.data import realistic_data
from backnorm.layout import mask_size
from tests.support.dtypes import ELEMENT_TYPES, FLOAT64

from . import high_precision as hp


@pytest.fixture(autouse=True)
def precision():
    with mpmath.workdps(hp.DIGITS):
        yield


def channel(values, index):
    if isinstance(values, reference.Exact):
        return reference.Exact(values.hi[:, index], values.lo[:, index])
    return values[:, index]


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("with_residual", [True, False])
def test_reference_forward_and_inference_with_relu_match_mpmath(dtype, with_residual, rng):
    data = realistic_data((3, 2, 5), dtype, rng=rng, ratio=10.0)
    added = rng.standard_normal(data.x.shape).astype(dtype)
    options = data.options | {
        "activation": RELU,
        "residual": added if with_residual else None,
    }
    parameters = (data.gamma, data.beta)
    trained = reference.forward(data.x, *parameters, **options)
    operands = reference.inference(data.x, data.mean, data.variance, *parameters, **options)
    cut_off = 0
    for c in range(2):
        gamma, beta, mean, variance = (
            mpf(float(values[c])) for values in (*parameters, data.mean, data.variance)
        )
        x, other = hp.numbers(channel(data.x, c)), hp.numbers(channel(added, c))
        y, own_mean, _ = hp.forward(x, gamma, beta, data.epsilon)
        known = hp.inference(x, mean, variance, gamma, beta, data.epsilon)
        for exact, values in ((trained, y), (operands, known)):
            if with_residual:
                values = [v + r for v, r in zip(values, other, strict=True)]
            cut_off += sum(v < 0 for v in values)
            expected = [max(v, mpf(0)) for v in values]
            hp.assert_equals(channel(exact.y, c), expected, channel(exact.y_terms, c))
        hp.assert_equals(trained.mean[c : c + 1], [own_mean], trained.mean_terms[c])
    assert 0 < cut_off < 2 * data.x.size


def test_terms_of_y_include_residual(rng):
    data = realistic_data((3, 2, 5), FLOAT64, rng=rng)
    residual = rng.standard_normal(data.x.shape)
    inputs = (data.x, data.mean, data.variance, data.gamma, data.beta)
    plain = reference.inference(*inputs, **data.options)
    added = reference.inference(*inputs, activation=RELU, residual=residual, **data.options)
    np.testing.assert_array_equal(added.y_terms, plain.y_terms + np.abs(residual))


def test_reference_relu_keeps_nan_without_mask_bit(rng):
    data = realistic_data((3, 2, 5), FLOAT64, rng=rng)
    residual = np.zeros(data.x.shape)
    residual[0, 0] = np.nan, np.inf, -np.inf, 1e3, -1e3
    y = reference.forward(data.x, activation=RELU, residual=residual, **data.options).y.hi
    np.testing.assert_array_equal(y[0, 0, :3], [np.nan, np.inf, 0.0])
    assert y[0, 0, 3] > 0 == y[0, 0, 4]
    mask = reference.pack_mask(y > 0, data.x)
    assert mask[0] & 0b11111 == 0b01010


def test_pack_mask_orders_bits_as_memory_of_x():
    x = np.zeros((2, 3, 5))
    positive = np.zeros(x.shape, bool)
    positive[0, 1, 4] = positive[1, 2, 4] = True
    mask = reference.pack_mask(positive, x)
    assert mask.shape == (mask_size(30),) == (4 + 16,)
    assert list(mask) == [0, 1 << 1, 0, 1 << 5] + 16 * [0]
    last = np.moveaxis(np.zeros((2, 5, 3)), -1, 1)
    mask = reference.pack_mask(positive, last)
    assert list(mask) == [0, 1 << 5, 0, 1 << 5] + 15 * [0] + [1]
    for like in (x, last):
        mask = reference.pack_mask(positive, like)
        np.testing.assert_array_equal(reference.unpack_mask(mask, like), positive)
    assert mask_size(0) == 16
    assert mask_size(64) == 24


@pytest.mark.parametrize("training", [True, False])
def test_reference_backward_with_mask_equals_backward_of_masked_dy(training, rng):
    data = realistic_data((3, 2, 5), FLOAT64, rng=rng)
    positive = rng.random(data.x.shape) < 0.5
    data.dy[0, 1, 2], positive[0, 1, 2] = np.nan, False
    mask = reference.pack_mask(positive, data.x)
    options = data.options | {"training": training}
    exact = reference.backward(*data.backward_inputs, mask=mask, **options)
    data.dy[~positive] = 0.0
    expected = reference.backward(*data.backward_inputs, **options)
    for name in ("dx", "dgamma", "dbeta"):
        np.testing.assert_array_equal(getattr(exact, name).hi, getattr(expected, name).hi)
        np.testing.assert_array_equal(getattr(exact, name).lo, getattr(expected, name).lo)
