"""Identities of the exact gradients that hold for any data."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.data import exact_data, realistic_data
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES, FLOAT64

TINY = 2.0**-94


def by_channel(exact):
    """Return (C, M) from (N, C, S)."""
    hi = np.moveaxis(exact.hi, 1, 0).reshape(exact.shape[1], -1)
    lo = np.moveaxis(exact.lo, 1, 0).reshape(exact.shape[1], -1)
    return reference.Exact(hi, lo)


@pytest.fixture
def layer(rng):
    """Data with the statistics of x, epsilon 0, and a gradient that is not exact."""
    data = exact_data((6, 5, 8), FLOAT64, rng=rng)
    assert data.true_statistics
    return data, rng.standard_normal(data.x.shape)


def test_dx_is_orthogonal_to_the_constant_and_to_x_hat(layer):
    data, dy = layer
    exact = reference.backward(data.x, dy, data.mean, data.variance, data.gamma, epsilon=0.0)
    dx = by_channel(exact.dx)
    scale = by_channel(reference.Exact.of(exact.dx_terms)).sum().hi
    np.testing.assert_array_less(np.abs(dx.sum().hi), TINY * scale)
    c = by_channel(reference.Exact.of(data.x - data.mean[:, None]))
    along = (dx * c).sum().hi
    np.testing.assert_array_less(np.abs(along), TINY * scale * np.abs(c.hi).max())


def test_dx_of_dy_in_span_of_constant_and_x_hat_is_zero(layer):
    data, _ = layer
    c = data.x - data.mean[:, None]
    dy = 3.0 + 0.5 * c
    exact = reference.backward(data.x, dy, data.mean, data.variance, data.gamma, epsilon=0.0)
    np.testing.assert_array_less(np.abs(exact.dx.hi), TINY * exact.dx_terms)
    assert np.abs(exact.dbeta.hi).min() > 1.0


def test_gradients_are_linear_in_dy(layer, rng):
    data, first = layer
    second = rng.integers(-50, 50, first.shape).astype(float)
    first = np.rint(first * 64)

    def gradients(dy):
        return reference.backward(data.x, dy, data.mean, data.variance, data.gamma, epsilon=1e-5)

    a, b, both = gradients(first), gradients(second), gradients(4.0 * first - second)
    for name in ("dx", "dgamma", "dbeta"):
        rest = getattr(both, name) - (getattr(a, name) * 4.0 - getattr(b, name))
        scale = getattr(a, f"{name}_terms") * 4.0 + getattr(b, f"{name}_terms")
        np.testing.assert_array_less(np.abs(rest.hi), TINY * scale)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_reference_dx_is_equal_in_both_layouts(dtype, rng):
    data = realistic_data((3, 4, 5, 2), dtype, rng=rng)
    last = [np.moveaxis(a, 1, -1) for a in (data.x, data.dy)]
    first = reference.backward(*data.backward_inputs, epsilon=data.epsilon)
    other = reference.backward(
        *last, data.mean, data.variance, data.gamma, epsilon=data.epsilon, data_format="NXC"
    )
    rest = first.dx - reference.Exact(
        np.moveaxis(other.dx.hi, -1, 1), np.moveaxis(other.dx.lo, -1, 1)
    )
    np.testing.assert_array_less(np.abs(rest.hi), TINY * first.dx_terms)


def test_reference_results_do_not_depend_on_block_size(rng, monkeypatch):
    data = realistic_data((5, 7, 3, 4), FLOAT64, rng=rng)
    whole = reference.backward(*data.backward_inputs, **data.options)
    normalized = reference.forward(data.x, data.gamma, data.beta, **data.options)
    internals.blocks_of_reference(monkeypatch, 6, 2)
    parts = reference.backward(*data.backward_inputs, **data.options)
    in_parts = reference.forward(data.x, data.gamma, data.beta, **data.options)
    pairs = [(whole, parts, n) for n in ("dx", "dgamma", "dbeta")]
    pairs += [(normalized, in_parts, n) for n in ("y", "mean", "variance")]
    for one, other, name in pairs:
        rest = getattr(one, name) - getattr(other, name)
        np.testing.assert_array_less(np.abs(rest.hi), TINY * getattr(one, f"{name}_terms"))


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4), (0, 0)])
def test_reference_of_empty_tensors_returns_zeros(shape):
    x, channels = np.zeros(shape, np.float32), shape[1]
    ones = np.ones(channels, np.float32)
    exact = reference.backward(x, x, ones, ones, ones, epsilon=0.0)
    assert exact.dx.shape == shape
    np.testing.assert_array_equal(exact.dgamma.hi, np.zeros(channels))
    np.testing.assert_array_equal(exact.dbeta.hi, np.zeros(channels))
    normalized = reference.forward(x, ones, ones, epsilon=0.0)
    assert normalized.y.shape == shape
    np.testing.assert_array_equal(normalized.mean.hi, np.zeros(channels))


@pytest.mark.parametrize("place", ["x", "dy", "mean", "variance", "gamma"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_reference_backward_of_nonfinite_values_matches_float64(place, value, rng):
    data = realistic_data((3, 2, 4), FLOAT64, rng=rng)
    arrays = dict(zip(("x", "dy", "mean", "variance", "gamma"), data.backward_inputs, strict=True))
    arrays[place] = arrays[place].copy()
    if place in ("x", "dy"):
        arrays[place][1, 1, 2] = value
    else:
        arrays[place][1] = value
    exact = reference.backward(**arrays, epsilon=1e-5)

    x, dy = arrays["x"], arrays["dy"]
    m, w, g = (arrays[n][:, None] for n in ("mean", "variance", "gamma"))
    with np.errstate(all="ignore"):
        s, c = 1.0 / np.sqrt(w + 1e-5), x - m
        mean_dy = dy.mean((0, 2))[:, None]
        mean_dy_xmu = (dy * c).mean((0, 2))[:, None]
        dx = g * s * (dy - mean_dy - c * (s * s * mean_dy_xmu))
        dgamma = s[:, 0] * (dy * c).sum((0, 2))
    np.testing.assert_allclose(exact.dx.hi, dx, rtol=1e-12)
    np.testing.assert_allclose(exact.dgamma.hi, dgamma, rtol=1e-12)
    np.testing.assert_allclose(exact.dbeta.hi, dy.sum((0, 2)), rtol=1e-12)
