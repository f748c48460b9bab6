"""The operations that return coefficients, from which compiled code computes y or dx."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from backnorm import batch_norm_backward, batch_norm_forward
from backnorm.executable import compute
from backnorm.options import Options

CASES = [
    (np.float64, "float64"),
    (np.float32, "float64"),
    (np.float32, "float32"),
    (np.float16, "float64"),
    (np.float16, "float32"),
    (ml_dtypes.bfloat16, "float32"),
]


@pytest.fixture(params=CASES, ids=lambda case: f"{np.dtype(case[0]).name} in {case[1]}")
def case(request, rng):
    dtype, arithmetic = request.param
    statistics = np.float32 if np.dtype(dtype).itemsize == 2 else dtype
    x, dy = (rng.normal(2, 3, (7, 20, 30)).astype(dtype) for _ in range(2))
    gamma, beta = (rng.uniform(0.5, 2, 20).astype(statistics) for _ in range(2))
    return x, dy, gamma, beta, arithmetic


def wide(array):
    return array.astype(np.float64)


def rows(coefficients, arithmetic):
    """Return the coefficients in float64, shaped to broadcast against x."""
    assert coefficients.dtype == arithmetic
    assert np.isfinite(coefficients).all()
    return wide(coefficients)[:, :, None]


def close(found, expected, arithmetic):
    tolerance = 1e-4 if arithmetic == "float32" else 1e-12
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_backward_coefficients_have_type_of_arithmetic_and_give_dx(case):
    x, dy, gamma, _, arithmetic = case
    mean, variance = wide(x).mean((0, 2)), wide(x).var((0, 2))
    channels = [each.astype(gamma.dtype) for each in (mean, variance)] + [gamma]
    options = Options(1e-5, arithmetic=arithmetic)
    *_, found = compute("backward_coefficients", (x, dy, *channels), options)
    center, shift, slope, gain = rows(found, arithmetic)
    dx = gain * ((wide(dy) - shift) - (wide(x) - center) * slope)
    exact = batch_norm_backward(*map(wide, (x, dy, *channels)), epsilon=1e-5).dx
    close(dx, exact, arithmetic)


def test_forward_coefficients_have_type_of_arithmetic_and_give_y(case):
    x, _, gamma, beta, arithmetic = case
    options = Options(1e-5, arithmetic=arithmetic)
    *_, found = compute("forward_coefficients", (x, gamma, beta), options)
    center, shift, slope, gain = rows(found, arithmetic)
    y = gain * ((wide(x) - center) - shift) + slope
    close(y, batch_norm_forward(*map(wide, (x, gamma, beta)), epsilon=1e-5).y, arithmetic)
