"""Float32's range, near whose ends the budget is kept; 16 bits, which are rounded once."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest

from backnorm.conformance.battery import Case, examine
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_forward
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32

from . import arrays

IN_FLOAT32 = {"arithmetic": "float32"}
SHAPES = {"NCX": (6, 5, 3, 4), "NXC": (6, 3, 4, 5)}


def data_of(dtype, data_format, *, x=1.0, dy=1.0):
    """Return data whose x and dy are multiplied by powers of two."""
    rng = np.random.default_rng(8)
    data = realistic_data(SHAPES[data_format], dtype, data_format=data_format, rng=rng)
    kind = data.x.dtype.type
    with np.errstate(over="ignore"):
        variance = data.variance * data.variance.dtype.type(x) ** 2
    return dataclasses.replace(
        data,
        x=data.x * kind(x),
        dy=data.dy * kind(dy),
        mean=data.mean * data.mean.dtype.type(x),
        variance=variance,
        epsilon=0.0,
    )


def failed(data):
    """Return what is not within the budget, of a forward and a backward pass."""
    verdicts = examine(partial(arrays.backward, **IN_FLOAT32), Case("", data, **IN_FLOAT32))
    settings = {**data.options, **IN_FLOAT32}
    operands = data.x, data.gamma, data.beta
    verdicts |= check_forward(*operands, arrays.forward(*operands, **settings), **settings)
    return [
        f"{quantity}: {verdict}" for quantity, verdict in verdicts.items() if not verdict.passed
    ]


@pytest.mark.covering(1)
@pytest.mark.parametrize("data_format", SHAPES)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(
    ("x", "dy"),
    [(1.0, 2.0**-90), (1.0, 2.0**110), (2.0**-45, 2.0**-45), (2.0**50, 2.0**60), (2.0**50, 1.0)],
    ids=["small dy", "large dy", "small products", "large products", "large x"],
)
def test_float32_arithmetic_within_its_range_passes_judge(x, dy, dtype, data_format):
    assert failed(data_of(dtype, data_format, x=x, dy=dy)) == []


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
def test_backward_in_float32_with_overflowing_products_returns_non_finite_dx(dtype):
    data = data_of(dtype, "NCX", x=2.0**40, dy=2.0**100)
    operands, options = data.backward_inputs, data.options
    dx, dgamma, dbeta = arrays.backward(*operands, **options, training=True, **IN_FLOAT32)
    for each in (dx, dgamma):
        assert not np.isfinite(each.astype(np.float64)).any()
    # Nothing is multiplied for it.
    assert np.isfinite(dbeta.astype(np.float64)).all()


def test_forward_in_float32_computes_squares_in_arithmetic_of_moments():
    data = data_of(BFLOAT16, "NCX", x=2.0**65)
    settings = {**data.options, **IN_FLOAT32}
    operands = data.x, data.gamma, data.beta
    y, mean, variance = arrays.forward(*operands, **settings)
    assert np.isfinite(mean).all()
    # Float32 holds no such variance; float64 has normalised by it before it was rounded.
    assert not np.isfinite(variance).any()
    assert np.isfinite(y.astype(np.float64)).all()


@pytest.mark.parametrize("data_format", SHAPES)
def test_backward_in_float32_with_subnormal_dy_has_small_errors(data_format):
    data = data_of(FLOAT32, data_format, dy=2.0**-130)
    settings = {**data.options, "training": True}
    found = arrays.backward(*data.backward_inputs, **settings, **IN_FLOAT32)
    data = dataclasses.replace(data, dy=data.dy.astype(np.float64) * 2.0**130)
    wide = (each.astype(np.float64) for each in data.backward_inputs)
    exact = arrays.backward(*wide, **settings)
    for each, other in zip(found, exact, strict=True):
        # A term that underflows is off by half of the least number there is.
        assert np.abs(each.astype(np.float64) - other * 2.0**-130).max() <= 2.0**-149 * 64


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_inference_of_16_bits_in_float64_rounds_once(dtype):
    # A step from the middle between two neighbours that float32 does not see.
    half, step = (2.0**-8, 2.0**-40) if dtype == BFLOAT16 else (2.0**-11, 2.0**-40)
    middle = 1.0 + half * np.array([1.0, 3.0, 1.0, 3.0])
    sign = np.array([1.0, 1.0, -1.0, -1.0])
    x = np.array([[1.0], [-1.0]]).repeat(4, axis=1).astype(dtype)
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    operands = zeros, ones, np.full(4, step, np.float32), (sign * middle).astype(np.float32)
    y = arrays.inference(x, *operands, epsilon=0.0, arithmetic="float64").astype(float)
    np.testing.assert_array_equal(y[0], sign * middle + half)
    np.testing.assert_array_equal(y[1], sign * middle - half)
