from __future__ import annotations

import warnings

import numpy as np
import pytest

from backnorm.dialects._statistics import (
    bessel_correction,
    blend,
    common_type,
    running,
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
    assert bessel_correction(4) == 4 / 3
    assert bessel_correction(1) == 1.0


def statistics(rng, count, dtype):
    """Return a mean and a variance for each channel, some of them at the limits of float32."""
    values = rng.normal(size=(2, count)) * 2.0 ** rng.integers(-140, 127, (2, count))
    values[:, ::5] = [[np.nan], [3e38]]
    with np.errstate(over="ignore"):
        mean, variance = values.astype(dtype)
    return mean, np.abs(variance)


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.75, 1.0])
@pytest.mark.parametrize("new_type", ["float32", "float64"])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 100])
def test_machine_code_averages_as_numpy_does(count, new_type, weight, rng):
    old, new = statistics(rng, count, F32), statistics(rng, count, new_type)
    scale = bessel_correction(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = running(old, new, weight, (F32, F32), scale)
        with np.errstate(over="ignore"):
            corrected = (new[1].astype(float) * scale).astype(new_type)
        expected = [blend(o, n, weight, F32) for o, n in zip(old, (new[0], corrected), strict=True)]
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, want, strict=True)
        assert not any(np.may_share_memory(got, each) for each in (*old, *new))


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.astype(">f4"),
        lambda a: a.astype(np.float16),
        lambda a: np.repeat(a, 2)[::2],
        lambda a: a.view(np.memmap),
        lambda a: np.frombuffer(b"0" + a.tobytes(), np.uint8)[1:].view(F32),
    ],
    ids=["byte-swapped", "16 bits", "strided", "subclass", "not aligned"],
)
def test_other_arrays_are_averaged_by_numpy(change, rng):
    old, new = (rng.uniform(1, 2, (2, 9)).astype(F32) for _ in range(2))
    given = [change(each.astype(np.float16).astype(F32)) for each in old]
    plain = [each.astype(np.float16).astype(F32) for each in old]
    found = running(given, new, 0.25, (F32, F32), 2.0)
    for got, want in zip(found, running(plain, new, 0.25, (F32, F32), 2.0), strict=True):
        np.testing.assert_array_equal(got, want, strict=True)


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
