from __future__ import annotations

import warnings

import numpy as np
import pytest

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, rounded


@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_float64_is_rounded_once(dtype, rng):
    below = np.concatenate([rng.uniform(1, 2, 1000), 2.0 ** rng.uniform(-26, 15, 1000)])
    below = below.astype(dtype)
    above = np.nextafter(below, dtype.type(np.inf))
    middle = (below.astype("d") + above.astype("d")) / 2
    wide = middle * (1 + rng.choice([-1, 0, 1], 2000) * 2.0 ** -rng.integers(26, 52, 2000))
    even = np.where(below.view(np.uint16) % 2 == 0, below, above)
    nearest = np.select([wide < middle, wide > middle], [below, above], even).astype(dtype)
    for sign in (1, -1):
        np.testing.assert_array_equal(rounded(sign * wide, dtype), sign * nearest, strict=True)
    grid = wide.reshape(40, 50)[::2, ::-3]
    np.testing.assert_array_equal(rounded(grid, dtype), nearest.reshape(40, 50)[::2, ::-3])


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
def test_what_is_too_large_becomes_infinite_without_a_warning(dtype):
    wide = np.array([1e300, -1e300, np.inf, np.nan, 1e-300, -0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = rounded(wide, dtype).astype("d")
    np.testing.assert_array_equal(found, [np.inf, -np.inf, np.inf, np.nan, 0.0, 0.0])


def test_nothing_to_round_is_the_same_array():
    values = np.ones(3)
    assert rounded(values, FLOAT64) is values
    assert rounded(np.ones((0, 2)), BFLOAT16).shape == (0, 2)
