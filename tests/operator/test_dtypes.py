"""Conversion of float64 to 16 bits with one rounding."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backnorm.dtypes import BFLOAT16, rounded

_BFLOAT16 = [
    (Fraction(float(value)), int(bits))
    for bits in range(0x7F80)
    for value in [np.uint16(bits).view(BFLOAT16)]
]


def nearest(value):
    """Return the nearest bfloat16 of a positive number; of two the one with an even last bit."""
    below = np.searchsorted(_VALUES, value, side="right") - 1
    candidates = _BFLOAT16[max(below - 1, 0) : below + 3]
    exact = Fraction(value)
    _, _, bits = min((abs(exact - number), bits & 1, bits) for number, bits in candidates)
    return bits


_VALUES = np.array([float(number) for number, _ in _BFLOAT16])


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
