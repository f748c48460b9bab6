from __future__ import annotations

import numpy as np
import pytest

from backnorm.dialects import tensorflow

GRADIENTS = {
    1: tensorflow.FusedBatchNormGrad,
    2: tensorflow.FusedBatchNormGradV2,
    3: tensorflow.FusedBatchNormGradV3,
}
FORWARDS = {
    1: tensorflow.FusedBatchNorm,
    2: tensorflow.FusedBatchNormV2,
    3: tensorflow.FusedBatchNormV3,
}
EMPTY = np.empty(0, "float32")


def gradient(b, version=3, **changes):
    inputs = {
        "y_backprop": b["dy"], "x": b["x"], "scale": b["gamma"],
        "reserve_space_1": b["mean"], "reserve_space_2": b["variance"],
    }  # fmt: skip
    if version == 3:
        inputs["reserve_space_3"] = EMPTY
    return GRADIENTS[version](**(inputs | changes))


def forward(b, version=3, **changes):
    inputs = {
        "x": b["x"], "scale": b["gamma"], "offset": b["beta"], "mean": EMPTY, "variance": EMPTY,
    }  # fmt: skip
    return FORWARDS[version](**(inputs | changes))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_gradient_of_each_version_has_own_output_names_and_same_values(batch, same, version):
    out = gradient(batch(), version)
    last = ("reserve_space_4", "reserve_space_5") if version == 3 else (
        "reserve_space_3", "reserve_space_4")  # fmt: skip
    assert out._fields == ("x_backprop", "scale_backprop", "offset_backprop", *last)
    assert [o.shape for o in out[3:]] == [(0,), (0,)]
    same(out[:3], gradient(batch())[:3])


@pytest.mark.parametrize("version", [1, 2, 3])
def test_forward_of_each_version_has_own_output_names(batch, version):
    out = forward(batch(), version)
    names = ("y", "batch_mean", "batch_variance", "reserve_space_1", "reserve_space_2")
    assert out._fields == names + (("reserve_space_3",) if version == 3 else ())
    if version == 3:
        assert out.reserve_space_3.shape == (0,)


def test_reserve_space_3_is_ignored(batch, same):
    b = batch()
    for anything in (np.ones((3, 2)), b["mean"], "opaque", object(), [float("nan")]):
        same(gradient(b, reserve_space_3=anything), gradient(b))


def test_gradient_of_inverse_standard_deviation_equals_that_of_variance(batch):
    # The inverse of a power of two is exact, so the results have the same bits.
    b = batch()
    b["variance"][:] = [0.25, 4.0, 1.0]
    inverse = np.array([2.0, 0.5, 1.0], "f")
    expected = gradient(b, epsilon=0.0)
    out = gradient(b, reserve_space_2=inverse, reserve_space_2_is="inverse_standard_deviation")
    for actual, wanted in zip(out[:3], expected[:3], strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_gradient_of_inverse_standard_deviation_is_rounded_once(batch):
    b = batch()
    inverse = np.array([0.7, 1.3, 0.01], "f")
    out = gradient(b, reserve_space_2=inverse, reserve_space_2_is="inverse_standard_deviation")
    x, dy, mean, gamma = (b[k].astype("d") for k in ("x", "dy", "mean", "gamma"))
    s, c = inverse.astype("d"), x - mean
    total, m = (dy * c).sum((0, 1, 2)), x[..., 0].size
    dx = gamma * s * (dy - dy.sum((0, 1, 2)) / m - c * s**2 * total / m)
    np.testing.assert_array_equal(out.x_backprop, dx.astype("f"))
    np.testing.assert_array_equal(out.scale_backprop, (s * total).astype("f"))


def test_gradient_propagates_special_inverse_deviations(batch):
    b = batch()
    inverse = np.array([np.inf, np.nan, 0.0], "f")
    out = gradient(b, reserve_space_2=inverse, reserve_space_2_is="inverse_standard_deviation")
    assert np.isinf(out.scale_backprop[0])
    assert np.isnan(out.scale_backprop[1])
    assert out.scale_backprop[2] == 0
    assert not np.isfinite(out.x_backprop[..., :2]).any()
    assert (out.x_backprop[..., 2] == 0).all()


def test_forward_applies_bessel_correction_to_batch_variance_only(batch):
    b = batch((2, 2, 3, 4))
    out = forward(b)
    wide = b["x"].astype("d")
    np.testing.assert_allclose(out.batch_variance, wide.var((0, 1, 2), ddof=1), rtol=2e-7)
    np.testing.assert_allclose(out.reserve_space_2, wide.var((0, 1, 2)), rtol=2e-7)
    np.testing.assert_array_equal(out.batch_mean, out.reserve_space_1)


def test_forward_of_one_element_per_channel_returns_zero_variance(batch):
    out = forward(batch((1, 1, 1, 4)))
    assert out.batch_variance.tolist() == [0.0] * 4


def test_forward_ignores_unread_mean_and_variance(batch, same):
    b = batch()
    wrong = np.full(7, np.nan, "f")
    same(forward(b, mean=wrong, variance=wrong), forward(b))


def test_forward_without_training_returns_given_statistics(batch):
    b = batch()
    out = forward(b, mean=b["mean"], variance=b["variance"], is_training=False)
    for got in (out.batch_mean, out.reserve_space_1):
        np.testing.assert_array_equal(got, b["mean"])
    for got in (out.batch_variance, out.reserve_space_2):
        np.testing.assert_array_equal(got, b["variance"])


def test_forward_of_empty_batch_returns_nan_statistics_and_zero_reserve(batch):
    out = forward(batch((0, 4, 4, 3)))
    assert out.y.shape == (0, 4, 4, 3)
    assert np.isnan(out.batch_mean).all()
    assert np.isnan(out.batch_variance).all()
    assert out.reserve_space_1.tolist() == out.reserve_space_2.tolist() == [0.0] * 3
