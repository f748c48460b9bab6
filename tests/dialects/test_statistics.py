from __future__ import annotations

import warnings

import numpy as np
import pytest

from backnorm.dialects._statistics import (
    bessel_corrected,
    blend,
    common_type,
    variance_of_inverse,
)

F32 = np.dtype("float32")


def test_blend_rounds_once():
    old, new = np.array([1.0], "f"), np.array([1 + 2**-23], "f")
    # 3/4 of an ulp above 1: the nearest float32 is the upper one.
    assert blend(old, new, 0.75, F32)[0] == np.float32(1 + 2**-23)
    assert blend(old, new, 0.25, F32)[0] == 1


def test_blend_does_not_look_at_what_has_no_weight():
    nan, one = np.array([np.nan], "f"), np.array([1.0], "f")
    assert blend(nan, one, 1.0, F32)[0] == 1
    assert blend(one, nan, 0.0, F32)[0] == 1


@pytest.mark.parametrize("weight", [1.0, 0.5, 0.0])
def test_what_is_blended_overflows_without_a_warning(weight):
    large = np.array([1e6, -1e6])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = blend(large, large, weight, np.dtype(np.float16))
    np.testing.assert_array_equal(found, np.array([np.inf, -np.inf], np.float16), strict=True)


def test_bessel_correction():
    variance = np.array([1.0, 3.0], "f")
    assert bessel_corrected(variance, 4).tolist() == [np.float32(4 / 3), 4.0]
    assert bessel_corrected(variance, 1).tolist() == [1.0, 3.0]


def test_variance_of_an_inverse_restores_it():
    rng = np.random.default_rng(0)
    inverse = np.exp(rng.uniform(-30, 30, 1000)).astype("f")
    wide = variance_of_inverse(inverse)
    assert wide.dtype == np.float64
    np.testing.assert_allclose(1 / np.sqrt(wide), inverse, rtol=2**-51)


@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0])
def test_variance_of_an_inverse_at_the_edge(value):
    (wide,) = variance_of_inverse(np.array([value], "f"))
    restored = np.float32(1 / np.sqrt(wide)) if not np.isinf(value) else None
    if value == 0:
        assert wide == np.inf
    elif np.isnan(value):
        assert np.isnan(wide)
    else:
        assert restored is None
        assert 0 < wide < 1e-250


def test_common_type_leaves_one_type_alone_and_widens_several():
    f32, f16 = np.ones(2, "f"), np.ones(2, "float16")
    swapped = np.ones(2, ">f8")
    alone = {"mean": swapped, "gamma": np.ones(2)}
    assert common_type(alone) is alone
    mixed = common_type({"mean": f32, "gamma": f16})
    assert {a.dtype for a in mixed.values()} == {F32}
