"""Conversion of float64 to 16 bits with one rounding."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backnorm.dtypes import BFLOAT16, rounded


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
