from __future__ import annotations

import warnings

import numpy as np
import pytest

from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, rounded


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
