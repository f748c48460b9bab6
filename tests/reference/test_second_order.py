"""The oracle's second order is the derivative of the backward pass, by differences in 80 digits."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from mpmath import mpf

from backnorm import reference
from backnorm.conformance.data import exact_data, realistic_data
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES, FLOAT64, is_16_bit

from . import high_precision as hp

EPSILON = 0.1
TINY = 2.0**-92


class Channel:
    """One channel of data, and the loss whose gradients are sought, in mpmath."""

    def __init__(self, rng, training):
        # Its mean and variance are float64 numbers, so that they are those of x.
        self.data = data = exact_data((10, 1), FLOAT64, rng=rng)
        assert data.true_statistics
        self.training = training
        self.dy, self.ddx = rng.standard_normal((2, 10, 1))
        self.ddgamma, self.ddbeta = rng.standard_normal((2, 1))
        self.inputs = [*hp.numbers(data.x), *hp.numbers(self.dy), mpf(float(data.gamma[0]))]

    def exact(self):
        data = self.data
        return reference.double_backward(
            data.x,
            self.dy,
            data.mean,
            data.variance,
            data.gamma,
            ddx=self.ddx,
            ddgamma=self.ddgamma,
            ddbeta=self.ddbeta,
            epsilon=EPSILON,
            training=self.training,
        )

    def loss(self, inputs):
        x, dy, gamma = inputs[:10], inputs[10:20], inputs[20]
        mean, variance = mpf(float(self.data.mean[0])), mpf(float(self.data.variance[0]))
        if self.training:
            _, mean, variance = hp.forward(x, gamma, mpf(0), EPSILON)
        dx, dgamma, dbeta = hp.backward(x, dy, mean, variance, gamma, EPSILON, self.training)
        weighted = mpmath.fsum(e * d for e, d in zip(hp.numbers(self.ddx), dx, strict=True))
        return weighted + float(self.ddgamma[0]) * dgamma + float(self.ddbeta[0]) * dbeta

    def derivative(self, index):
        step, values = mpf(10) ** -20, []
        for sign in (1, -1):
            moved = list(self.inputs)
            moved[index] += sign * step
            values.append(self.loss(moved))
        return (values[0] - values[1]) / (2 * step)


def assert_close(exact, index, expected):
    value = mpf(float(exact.hi[index])) + mpf(float(exact.lo[index]))
    assert abs(value - expected) < mpf(10) ** -28


@pytest.mark.parametrize("training", [True, False])
def test_reference_double_backward_equals_derivative_of_backward(training, rng):
    channel = Channel(rng, training)
    exact = channel.exact()
    assert np.abs(exact.x.hi).min() > 1e-4
    with mpmath.workdps(80):
        for i in range(10):
            assert_close(exact.x, (i, 0), channel.derivative(i))
            assert_close(exact.dy, (i, 0), channel.derivative(10 + i))
        assert_close(exact.gamma, 0, channel.derivative(20))


def layer(rng, dtype=FLOAT64, shape=(3, 4, 5, 2), **options):
    data = realistic_data(shape, dtype, rng=rng, **options)
    ddx = rng.standard_normal(shape).astype(dtype)
    ddgamma, ddbeta = rng.standard_normal((2, data.mean.size)).astype(data.mean.dtype)
    return data, {"ddx": ddx, "ddgamma": ddgamma, "ddbeta": ddbeta}


def dot(*pairs):
    """Return the sum of products of double-doubles with float64 arrays, and of magnitudes."""
    total, size = reference.Exact.of(np.zeros(())), 0.0
    for exact, terms, other in pairs:
        flat = reference.Exact(exact.hi.ravel(), exact.lo.ravel())
        total = total + (flat * np.asarray(other, float).ravel()).sum()
        size += float((terms * np.abs(np.asarray(other, float))).sum())
    return total, size


@pytest.mark.parametrize("training", [True, False])
def test_reference_double_backward_is_adjoint_of_backward_in_dy_and_gamma(training, rng):
    """The backward pass is linear in dy and in gamma, so its derivatives are known from itself."""
    data, cotangents = layer(rng)
    first = reference.backward(*data.backward_inputs, training=training, **data.options)
    second = reference.double_backward(
        *data.backward_inputs, **cotangents, training=training, **data.options
    )
    value, size = dot(
        (first.dx, first.dx_terms, cotangents["ddx"]),
        (first.dgamma, first.dgamma_terms, cotangents["ddgamma"]),
        (first.dbeta, first.dbeta_terms, cotangents["ddbeta"]),
    )
    by_dy, other = dot((second.dy, second.dy_terms, data.dy))
    assert abs((value - by_dy).hi) <= TINY * (size + other)
    only_dx, size = dot((first.dx, first.dx_terms, cotangents["ddx"]))
    by_gamma, other = dot((second.gamma, second.gamma_terms, data.gamma))
    assert abs((only_dx - by_gamma).hi) <= TINY * (size + other)


def test_reference_double_backward_by_x_is_symmetric(rng):
    """<a, d(dx)/dx b> = <b, d(dx)/dx a>: dx is the gradient of a loss that is linear in y.

    It needs the statistics to be those of x.
    """
    data = exact_data((6, 5, 8), FLOAT64, rng=rng)
    assert data.true_statistics
    a, b = rng.standard_normal((2, *data.x.shape))
    dy = rng.standard_normal(data.x.shape)

    def hessian_times(vector):
        return reference.double_backward(
            data.x, dy, data.mean, data.variance, data.gamma, ddx=vector, epsilon=EPSILON
        )

    one, other = hessian_times(a), hessian_times(b)
    left, size = dot((one.x, one.x_terms, b))
    right, more = dot((other.x, other.x_terms, a))
    assert abs((left - right).hi) <= TINY * (size + more)
    assert abs(left.hi) > 1e-6 * size


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_reference_double_backward_does_not_depend_on_layout_or_block_size(
    dtype, training, rng, monkeypatch
):
    data, cotangents = layer(rng, dtype)
    first = reference.double_backward(
        *data.backward_inputs, **cotangents, training=training, epsilon=data.epsilon
    )
    internals.blocks_of_reference(monkeypatch, 6, 2)
    last = {name: np.moveaxis(a, 1, -1) for name, a in (("x", data.x), ("dy", data.dy))}
    cotangents["ddx"] = np.moveaxis(cotangents["ddx"], 1, -1)
    other = reference.double_backward(
        **last, mean=data.mean, variance=data.variance, gamma=data.gamma, **cotangents,
        training=training, epsilon=data.epsilon, data_format="NXC",
    )  # fmt: skip
    for name in ("x", "dy"):
        exact = getattr(other, name)
        moved = reference.Exact(np.moveaxis(exact.hi, -1, 1), np.moveaxis(exact.lo, -1, 1))
        rest = getattr(first, name) - moved
        np.testing.assert_array_less(np.abs(rest.hi), TINY * getattr(first, f"{name}_terms"))
    rest = first.gamma - other.gamma
    np.testing.assert_array_less(np.abs(rest.hi), TINY * first.gamma_terms)


def test_reference_double_backward_terms_equal_magnitudes_of_formula(rng):
    data, cotangents = layer(rng, shape=(3, 1, 4))
    exact = reference.double_backward(*data.backward_inputs, **cotangents, **data.options)
    count = data.x.size
    c, dy, ddx = (np.abs(a) for a in (data.x - data.mean[0], data.dy, cotangents["ddx"]))
    s, g = 1.0 / np.sqrt(data.variance[0] + data.epsilon), abs(data.gamma[0])
    ddgamma, ddbeta = abs(cotangents["ddgamma"][0]), abs(cotangents["ddbeta"][0])
    h = c * s
    p, q, r = (ddx * h).sum(), (dy * h).sum(), (dy * ddx).sum()
    covariance = r + ddx.sum() * dy.sum() / count
    x_terms = g * s**2 / count * (
        h * (covariance + 3 * p * q / count) + p * (dy + dy.mean()) + q * (ddx + ddx.mean())
    ) + ddgamma * s * (dy + dy.mean() + h * q / count)  # fmt: skip
    dy_terms = g * s * (ddx + ddx.mean() + h * p / count) + ddgamma * h + ddbeta
    np.testing.assert_allclose(exact.x_terms, x_terms, rtol=1e-14)
    np.testing.assert_allclose(exact.dy_terms, dy_terms, rtol=1e-14)
    np.testing.assert_allclose(exact.gamma_terms, s * (covariance + p * q / count), rtol=1e-14)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4), (0, 0)])
@pytest.mark.parametrize("training", [True, False])
def test_reference_double_backward_of_empty_tensors_returns_zeros(shape, training):
    x, ones = np.zeros(shape, np.float32), np.ones(shape[1], np.float32)
    exact = reference.double_backward(
        x, x, ones, ones, ones, ddx=x, ddgamma=ones, ddbeta=ones, epsilon=0.0, training=training
    )
    assert exact.x.shape == exact.dy.shape == shape
    np.testing.assert_array_equal(exact.gamma.hi, np.zeros(shape[1]))


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_reference_double_backward_without_cotangent_equals_zero_cotangent(dtype, rng):
    data, cotangents = layer(rng, dtype)
    for name in cotangents:
        rest = {**cotangents, name: None}
        zero = {**cotangents, name: np.zeros_like(cotangents[name])}
        absent, operands = (
            reference.double_backward(*data.backward_inputs, **c, **data.options)
            for c in (rest, zero)
        )
        np.testing.assert_array_equal(absent.x.hi, operands.x.hi)
        np.testing.assert_array_equal(absent.dy.hi, operands.dy.hi)
        np.testing.assert_array_equal(absent.gamma.hi, operands.gamma.hi)
    assert is_16_bit(dtype) or np.abs(operands.gamma.hi).min() > 0
