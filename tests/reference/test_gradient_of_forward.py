"""The oracle's gradients are the derivatives of the forward, by differences in 80 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from backnorm import reference
from backnorm.conformance.data import exact_data

from . import high_precision as hp

FLOAT64 = np.dtype(np.float64)
EPSILON = 0.1


def derivative(function, arguments, index):
    """Return the central difference; its error is about the square of the step."""
    step = mpf(10) ** -20
    shifted = []
    for sign in (1, -1):
        moved = list(arguments)
        moved[index] += sign * step
        shifted.append(function(moved))
    return (shifted[0] - shifted[1]) / (2 * step)


def assert_close(exact, index, expected):
    value = mpf(float(exact.hi[index])) + mpf(float(exact.lo[index]))
    assert abs(value - expected) < mpf(10) ** -28


@pytest.fixture
def channel(rng):
    """One channel whose mean and variance are float64 numbers, so that they are those of x."""
    data = exact_data((10, 1), FLOAT64, rng=rng)
    assert data.true_statistics
    return data, rng.standard_normal((10, 1))


def loss(x, dy, gamma, beta):
    y, _, _ = hp.forward(x, gamma, beta, EPSILON)
    return mpmath.fsum(d * v for d, v in zip(dy, y, strict=True))


def test_reference_backward_equals_derivative_of_forward(channel):
    data, gradient = channel
    exact = reference.backward(
        data.x, gradient, data.mean, data.variance, data.gamma, epsilon=EPSILON
    )
    with mpmath.workdps(80):
        x, dy = hp.numbers(data.x), hp.numbers(gradient)
        gamma, beta = mpf(float(data.gamma[0])), mpf(float(data.beta[0]))
        for i in range(len(x)):
            assert_close(exact.dx, (i, 0), derivative(lambda v: loss(v, dy, gamma, beta), x, i))
        assert_close(exact.dgamma, 0, derivative(lambda g: loss(x, dy, g[0], beta), [gamma], 0))
        assert_close(exact.dbeta, 0, derivative(lambda b: loss(x, dy, gamma, b[0]), [beta], 0))


def test_reference_frozen_dx_equals_derivative_of_inference(channel):
    data, gradient = channel
    exact = reference.backward(
        data.x, gradient, data.mean, data.variance, data.gamma, epsilon=EPSILON, training=False
    )
    with mpmath.workdps(80):
        x, dy = hp.numbers(data.x), hp.numbers(gradient)
        gamma, beta = mpf(float(data.gamma[0])), mpf(float(data.beta[0]))
        mean, variance = mpf(float(data.mean[0])), mpf(float(data.variance[0]))

        def frozen_loss(values):
            y = hp.inference(values, mean, variance, gamma, beta, EPSILON)
            return mpmath.fsum(d * v for d, v in zip(dy, y, strict=True))

        for i in range(len(x)):
            assert_close(exact.dx, (i, 0), derivative(frozen_loss, x, i))
