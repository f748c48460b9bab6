"""Conversion between element types with one rounding."""

from __future__ import annotations

import warnings
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, rounded


def nearest(value):
    """Return the bits of the nearest bfloat16 to a positive number; of two, the even ones."""
    # A float32 is at most one bfloat16 away from its first 16 bits.
    first = int(np.float32(value).view(np.uint32)) >> 16
    candidates = np.arange(max(first - 1, 0), first + 3, dtype=np.uint16)
    values = [Fraction(float(each)) for each in candidates.view(BFLOAT16)]
    distances = [abs(each - Fraction(value)) for each in values]
    return min(zip(distances, candidates & 1, candidates, strict=True))[2]


@pytest.mark.parametrize(
    "value",
    [1 + 2**-8 + 2**-40, 2**-134, 2**-134 * (1 + 2**-50), 4.5 * 2**-133 + 2**-155, 1.5 * 2**-133],
)
def test_rounded_bfloat16_near_a_midpoint_is_the_nearest_value(value):
    assert rounded(np.array([value]), BFLOAT16).view(np.uint16)[0] == nearest(value)


@given(
    half_steps=st.integers(1, 1 << 12),
    exponent=st.integers(-134, 110),
    shift=st.integers(-60, -16),
    sign=st.sampled_from([-1, 0, 1]),
)
def test_rounded_bfloat16_is_the_nearest_value(half_steps, exponent, shift, sign):
    value = half_steps * 2.0**exponent * (1 + sign * 2.0**shift)
    assert rounded(np.array([value]), BFLOAT16).view(np.uint16)[0] == nearest(value)


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_rounded_rounds_float64_once(dtype, near_middles):
    wide, nearest = near_middles(dtype)
    for sign in (1, -1):
        np.testing.assert_array_equal(rounded(sign * wide, dtype), sign * nearest, strict=True)
    grid = wide.reshape(40, 50)[::2, ::-3]
    np.testing.assert_array_equal(rounded(grid, dtype), nearest.reshape(40, 50)[::2, ::-3])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_rounded_on_overflow_returns_infinity_without_warning(dtype):
    wide = np.array([1e300, -1e300, np.inf, np.nan, 1e-300, -0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rounded(wide, dtype).astype("d")
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.inf, np.nan, 0.0, 0.0])


def test_rounded_returns_float64_array_itself_and_keeps_empty_shape():
    values = np.ones(3)
    assert rounded(values, FLOAT64) is values
    assert rounded(np.ones((0, 2)), BFLOAT16).shape == (0, 2)
