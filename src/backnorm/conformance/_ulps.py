"""Errors in ulps: units in the last place of a floating-point type."""

from __future__ import annotations

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.reference import Exact, FloatArray

# For each type: the number of its significant bits, the exponent of its least normal number, and
# the exponent of its largest finite number.
_FORMATS = {
    FLOAT64: (53, -1022, 1023),
    FLOAT32: (24, -126, 127),
    FLOAT16: (11, -14, 15),
    BFLOAT16: (8, -126, 127),
}


def ulp_error(actual: np.ndarray, exact: Exact, dtype: np.dtype) -> FloatArray:
    """Return ``|actual - exact|`` in units in the last place of `dtype` at the exact value.

    Parameters
    ----------
    actual : numpy.ndarray
        Values representable in `dtype`.
    exact : Exact
        Exact values, of the same shape.
    dtype : numpy.dtype
        float64, float32, float16 or bfloat16.

    Returns
    -------
    numpy.ndarray
        float64. The ulp at a value of exponent e is ``2**(e - precision + 1)``; below the normal
        range it is the smallest subnormal. Except in float64, infinity counts as the power of two
        after the largest finite number, so overflow is no error if the exact value overflows. Equal
        infinities, and NaN where NaN is expected, have the error 0; any other non-finite difference
        is an infinite error.
    """
    with np.errstate(over="ignore"):
        ulps: FloatArray = absolute_error(actual, exact, dtype) / ulp_at(exact, dtype)
    return ulps


def ulp_at(exact: Exact, dtype: np.dtype) -> FloatArray:
    """Return, for each exact value, the ulp of a `dtype` number with the value's exponent."""
    bits, least, largest = _FORMATS[dtype]
    fraction, exponent = np.frexp(exact.hi)
    exponent = exponent.astype(np.int64) - 1
    # If hi is a power of two and lo has the opposite sign, the exact value hi + lo is smaller in
    # magnitude than hi, and its exponent is one less than that of hi.
    exponent -= (np.abs(fraction) == 0.5) & (exact.lo * np.sign(exact.hi) < 0)
    exponent = np.where(exact.hi == 0, least, exponent)
    result: FloatArray = np.ldexp(1.0, np.clip(exponent, least, largest) - bits + 1)
    return result


def absolute_error(actual: np.ndarray, exact: Exact, dtype: np.dtype) -> FloatArray:
    """Return |actual - exact|; overflow counts as in :func:`ulp_error`."""
    _, _, largest = _FORMATS[dtype]
    hi, lo = exact.hi, exact.lo
    with np.errstate(all="ignore"):
        value = np.asarray(actual, np.float64)
        same = (value == hi) & ~np.isfinite(hi) | np.isnan(value) & np.isnan(hi)
        if dtype != FLOAT64:
            beyond = 2.0 ** (largest + 1)
            overflowed = np.isinf(value) & np.isfinite(hi)
            value = np.where(overflowed, np.copysign(beyond, value), value)
            outside = np.isfinite(hi) & (np.abs(hi) >= beyond)
            hi = np.where(outside, np.copysign(beyond, hi), hi)
            lo = np.where(outside, 0.0, lo)
        error = np.abs((value - hi) - lo)
    result: FloatArray = np.where(same, 0.0, np.where(np.isnan(error), np.inf, error))
    return result
