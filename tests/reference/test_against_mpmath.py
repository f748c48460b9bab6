"""The oracle against the same mathematics in 60 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from backnorm import reference
from backnorm.conformance.data import realistic_data
from tests.support.dtypes import ELEMENT_TYPES

from . import high_precision as hp

SHAPES = {"NCX": [(3, 2), (2, 3, 5), (4, 2, 3, 2)], "NXC": [(3, 2), (2, 5, 3), (2, 2, 3, 2, 4)]}
CASES = [(f, shape) for f, shapes in SHAPES.items() for shape in shapes]


@pytest.fixture(autouse=True)
def precision():
    with mpmath.workdps(hp.DIGITS):
        yield


def channel(values, data_format, index):
    return np.take(values, index, axis=1 if data_format == "NCX" else -1)


def take(exact, data_format, index):
    return reference.Exact(
        channel(exact.hi, data_format, index), channel(exact.lo, data_format, index)
    )


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("data_format", "shape"), CASES)
def test_reference_backward_matches_mpmath(dtype, training, data_format, shape, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=100.0)
    exact = reference.backward(*data.backward_inputs, training=training, **data.options)
    for c in range(data.mean.size):
        dx, dgamma, dbeta = hp.backward(
            hp.numbers(channel(data.x, data_format, c)),
            hp.numbers(channel(data.dy, data_format, c)),
            mpf(float(data.mean[c])),
            mpf(float(data.variance[c])),
            mpf(float(data.gamma[c])),
            data.epsilon,
            training,
        )
        terms = channel(exact.dx_terms, data_format, c)
        hp.assert_equals(take(exact.dx, data_format, c), dx, terms)
        hp.assert_equals(exact.dgamma[c : c + 1], [dgamma], exact.dgamma_terms[c])
        hp.assert_equals(exact.dbeta[c : c + 1], [dbeta], exact.dbeta_terms[c])


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), CASES)
def test_reference_forward_and_inference_match_mpmath(dtype, data_format, shape, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=100.0)
    exact = reference.forward(data.x, data.gamma, data.beta, **data.options)
    operands = reference.inference(
        data.x, data.mean, data.variance, data.gamma, data.beta, **data.options
    )
    for c in range(data.mean.size):
        x = hp.numbers(channel(data.x, data_format, c))
        gamma, beta = mpf(float(data.gamma[c])), mpf(float(data.beta[c]))
        y, mean, variance = hp.forward(x, gamma, beta, data.epsilon)
        terms = channel(exact.y_terms, data_format, c)
        hp.assert_equals(take(exact.y, data_format, c), y, terms)
        hp.assert_equals(exact.mean[c : c + 1], [mean], exact.mean_terms[c])
        hp.assert_equals(exact.variance[c : c + 1], [variance], exact.variance_terms[c])

        supplied = mpf(float(data.mean[c])), mpf(float(data.variance[c]))
        y = hp.inference(x, *supplied, gamma, beta, data.epsilon)
        hp.assert_equals(
            take(operands.y, data_format, c), y, channel(operands.y_terms, data_format, c)
        )


def test_reference_backward_terms_equal_magnitudes_of_formula(rng):
    data = realistic_data((3, 1, 4), np.dtype(np.float64), rng=rng)
    exact = reference.backward(*data.backward_inputs, **data.options)
    c = np.abs(data.x - data.mean[0])
    s = 1.0 / np.sqrt(data.variance[0] + data.epsilon)
    dy = np.abs(data.dy)
    dx_terms = abs(data.gamma[0] * s) * (dy + dy.mean() + c * s**2 * (dy * c).mean())
    np.testing.assert_allclose(exact.dx_terms, dx_terms, rtol=1e-14)
    np.testing.assert_allclose(exact.dgamma_terms, s * (dy * c).sum(), rtol=1e-14)
    np.testing.assert_allclose(exact.dbeta_terms, dy.sum(), rtol=1e-14)
    frozen = reference.backward(*data.backward_inputs, training=False, **data.options)
    np.testing.assert_allclose(frozen.dx_terms, abs(data.gamma[0] * s) * dy, rtol=1e-14)
