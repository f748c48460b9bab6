from __future__ import annotations

import numpy as np
import pytest

from backnorm.dialects._statistics import variance_of_inverse


def test_variance_of_inverse_restores_inverse():
    rng = np.random.default_rng(0)
    inverse = np.exp(rng.uniform(-30, 30, 1000)).astype("f")
    wide = variance_of_inverse(inverse)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(1 / np.sqrt(wide), inverse, rtol=2**-51)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0])
def test_variance_of_inverse_of_special_values_is_inf_nan_or_tiny(value):
    (wide,) = variance_of_inverse(np.array([value], "f"))
    if value == 0:
        assert wide == np.inf
    elif np.isnan(value):
        assert np.isnan(wide)
    else:
        assert 0 < wide < 1e-250
