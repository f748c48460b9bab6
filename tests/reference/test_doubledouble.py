"""Double-double arithmetic against rational arithmetic, which is exact."""

from __future__ import annotations

import operator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backnorm.reference._doubledouble import Exact

PRECISION = Fraction(1, 2**100)
NUMBERS = st.floats(-1e30, 1e30, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-30)


def pair(hi, lo_share):
    """Return a normalised double-double of two floats."""
    lo = hi * lo_share * 2.0**-54
    return Exact(np.array([hi]), np.array([lo]))


def fraction(value):
    return Fraction(float(value.hi[0])) + Fraction(float(value.lo[0]))


SHARES = st.floats(-0.9, 0.9, allow_subnormal=False).filter(lambda v: v == 0 or abs(v) > 1e-6)
PAIRS = st.builds(pair, NUMBERS, SHARES)


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul])
@given(a=PAIRS, b=PAIRS)
def test_operators_are_exact_to_100_bits(operation, a, b):
    exact = operation(fraction(a), fraction(b))
    scale = exact if operation is operator.mul else abs(fraction(a)) + abs(fraction(b))
    assert abs(fraction(operation(a, b)) - exact) <= PRECISION * abs(scale)


@given(a=PAIRS, b=PAIRS)
def test_quotients_are_exact_to_100_bits(a, b):
    if b.hi[0] == 0:
        return
    exact = fraction(a) / fraction(b)
    assert abs(fraction(a / b) - exact) <= PRECISION * abs(exact)


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul])
@given(a=PAIRS, b=NUMBERS)
def test_operators_accept_float64_arrays_on_either_side(operation, a, b):
    array = np.array([b])
    as_pair = Exact.of(array)
    for left, right, pair_left, pair_right in ((a, array, a, as_pair), (array, a, as_pair, a)):
        mixed, pure = operation(left, right), operation(pair_left, pair_right)
        scale = abs(fraction(a)) + abs(Fraction(b))
        if operation is operator.mul:
            scale = abs(fraction(a)) * abs(Fraction(b))
        assert abs(fraction(mixed) - fraction(pure)) <= 2 * PRECISION * scale


@given(a=PAIRS.filter(lambda a: a.hi[0] > 0))
def test_sqrt_squared_equals_number_within_rounding(a):
    root = fraction(a.sqrt())
    assert abs(root * root - fraction(a)) <= 4 * PRECISION * fraction(a)


@given(values=st.lists(NUMBERS, min_size=0, max_size=33))
def test_sums_are_exact_to_100_bits(values):
    total = Exact.of(np.array([values], np.float64).reshape(1, -1)).sum()
    exact = sum(map(Fraction, values), Fraction(0))
    assert abs(fraction(total) - exact) <= PRECISION * sum(abs(Fraction(v)) for v in values)


def test_settled_replaces_nonfinite_values_by_float64_results():
    with np.errstate(all="ignore"):
        value = Exact.of(np.array([1.0, np.inf, np.nan])) * 3.0
    settled = value.settled(np.array([7.0, np.inf, np.nan]))
    np.testing.assert_array_equal(settled.hi, [3.0, np.inf, np.nan])
    np.testing.assert_array_equal(settled.lo, [0.0, 0.0, 0.0])
