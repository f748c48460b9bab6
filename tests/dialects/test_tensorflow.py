from __future__ import annotations

import itertools

import numpy as np
import pytest

from backnorm import BacknormError, batch_norm_backward
from backnorm.dialects import tensorflow

TYPES = ("f64", "f32", "f16", "bf16")
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


def rejects(error_type, match, function, *args, **changes):
    with pytest.raises(error_type, match=match) as error:
        function(*args, **changes)
    assert isinstance(error.value, BacknormError)


@pytest.mark.parametrize(("data", "channel"), list(itertools.product(TYPES, TYPES)))
@pytest.mark.parametrize("version", [1, 2, 3])
def test_operators_accept_types_of_version_only(batch, version, data, channel):
    b = batch(dtype=data, channel=channel)
    accepted = channel == "f32" and data in (("f32",) if version == 1 else ("f16", "bf16", "f32"))
    for function in (gradient, forward):
        if accepted:
            out = function(b, version)
            assert out[0].dtype == b["x"].dtype
            assert {o.dtype for o in out[1:]} == {np.dtype("float32")}
        else:
            rejects(TypeError, r"^(x|scale): ", function, b, version)


def test_gradient_with_wrong_y_backprop_type_raises_type_error(batch):
    b = batch()
    rejects(TypeError, r"y_backprop: .*float16.*float32", gradient, b,
            y_backprop=b["dy"].astype("float16"))  # fmt: skip


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


def test_operators_without_attributes_equal_documented_defaults(batch, same):
    b = batch()
    same(
        gradient(b),
        gradient(b, epsilon=0.0001, data_format="NHWC", is_training=True, name=None),
    )
    same(
        forward(b),
        forward(b, epsilon=0.0001, exponential_avg_factor=1, data_format="NHWC", is_training=True),
    )
    expected = batch_norm_backward(
        b["x"], b["dy"], b["mean"], b["variance"], b["gamma"],
        epsilon=float(np.float32(0.0001)), data_format="NXC",
    )  # fmt: skip
    same(gradient(b)[:3], expected)


def test_gradient_rejects_positional_arguments(batch):
    b = batch()
    with pytest.raises(TypeError):
        tensorflow.FusedBatchNormGradV3(b["dy"], b["x"])


@pytest.mark.parametrize(
    "name",
    ["y_backprop", "x", "scale", "reserve_space_1", "reserve_space_2", "reserve_space_3"],
)
def test_gradient_without_required_input_raises_error_of_input(batch, name):
    rejects(TypeError, f"{name}: is a required input", gradient, batch(), **{name: None})


def test_reserve_space_3_is_ignored(batch, same):
    b = batch()
    for anything in (np.ones((3, 2)), b["mean"], "opaque", object(), [float("nan")]):
        same(gradient(b, reserve_space_3=anything), gradient(b))


@pytest.mark.parametrize("shape", [(4, 5, 3), (5, 3), (3,), (), (1, 2, 2, 2, 2, 3)])
def test_operators_v3_of_rank_other_than_4_or_5_raise_value_error(shape):
    x = np.ones(shape, "f")
    c = np.ones(3, "f")
    b = {"x": x, "dy": x, "gamma": c, "beta": c, "mean": c, "variance": c}
    rejects(ValueError, "x: input must be 4 or 5-dimensional", gradient, b)
    rejects(ValueError, "x: input must be 4 or 5-dimensional", forward, b)


@pytest.mark.parametrize("version", [1, 2])
def test_gradient_of_v1_and_v2_rejects_5_axes_and_ndhwc(batch, version):
    b = batch((2, 2, 3, 3, 4))
    rejects(ValueError, "input must be 4-dimensional", gradient, b, version)
    rejects(ValueError, "data_format: unknown value", gradient, b, version, data_format="NDHWC")


@pytest.mark.parametrize("data_format", ["NDHWC", "NCDHW"])
def test_data_format_longer_than_rank_raises_value_error(batch, data_format):
    rejects(
        ValueError, r"data_format: must name as many axes as x has.*'NHWC' or 'NCHW'",
        gradient, batch(), data_format=data_format,
    )  # fmt: skip


@pytest.mark.parametrize("data_format", ["NHWC", "NCHW"])
def test_data_format_shorter_than_rank_raises_value_error(batch, data_format):
    b = batch((2, 2, 3, 3, 4))
    rejects(
        ValueError, r"data_format: must name as many axes as x has.*'NDHWC' or 'NCDHW'",
        gradient, b, data_format=data_format,
    )  # fmt: skip


@pytest.mark.parametrize("data_format", ["NCX", "NXC", "nhwc", "NWC"])
def test_data_format_with_unknown_value_raises_value_error(batch, data_format):
    rejects(ValueError, "data_format: unknown value", gradient, batch(), data_format=data_format)


@pytest.mark.parametrize("name", ["scale", "reserve_space_1", "reserve_space_2"])
def test_gradient_with_wrong_channel_shape_raises_error_of_input(batch, name):
    b = batch()
    for size in (0, 2, 4):
        rejects(
            ValueError,
            rf"{name}: must have the same number of elements as the channels of x; "
            rf"got {size} and 3",
            gradient, b, **{name: np.ones(size, "f")},
        )  # fmt: skip
    for shape in ((), (1, 3)):
        rejects(ValueError, f"{name}: must be 1-dimensional", gradient, b,
                **{name: np.ones(shape, "f")})  # fmt: skip


def test_gradient_with_wrong_y_backprop_shape_raises_value_error(batch):
    b = batch()
    for bad in (b["dy"][:2], np.concatenate([b["dy"], b["dy"]]), b["dy"][..., :2]):
        rejects(
            ValueError, r"y_backprop: x and y_backprop must have same shape", gradient, b,
            y_backprop=bad,
        )  # fmt: skip


def test_gradient_in_nchw_with_is_training_false_equals_frozen_gradient(batch, same):
    b = batch((3, 4, 5, 5), "NCX")
    out = gradient(b, data_format="NCHW", is_training=False, epsilon=0.5)
    expected = batch_norm_backward(
        b["x"], b["dy"], b["mean"], b["variance"], b["gamma"], epsilon=0.5, training=False
    )
    same(out[:3], expected)


@pytest.mark.parametrize("value", [1, 0, "True", None, np.float32(1)])
def test_is_training_that_is_not_boolean_raises_type_error(batch, value):
    rejects(TypeError, "is_training: must be a boolean", gradient, batch(), is_training=value)


@pytest.mark.parametrize("epsilon", [-1e-30, -1.0, float("nan"), float("inf"), 1e60])
def test_epsilon_negative_or_not_finite_raises_value_error(batch, epsilon):
    for function in (gradient, forward):
        rejects(ValueError, "epsilon: must be finite and not negative", function, batch(),
                epsilon=epsilon)  # fmt: skip


def test_gradient_ignores_name_and_rejects_name_of_wrong_type(batch, same):
    b = batch()
    same(gradient(b, name="layer"), gradient(b))
    rejects(TypeError, "name: must be a string", gradient, b, name=3)


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 3), (2, 4, 4, 0)])
@pytest.mark.parametrize("is_training", [True, False])
def test_gradient_of_empty_x_returns_zero_gradients(batch, shape, is_training):
    out = gradient(batch(shape), is_training=is_training)
    assert out.x_backprop.shape == shape
    for parameter in out[1:3]:
        assert parameter.tolist() == [0.0] * shape[-1]
    assert [o.shape for o in out[3:]] == [(0,), (0,)]


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


def test_gradient_propagates_special_inverse_deviations_and_rejects_negative(batch):
    b = batch()
    inverse = np.array([np.inf, np.nan, 0.0], "f")
    out = gradient(b, reserve_space_2=inverse, reserve_space_2_is="inverse_standard_deviation")
    assert np.isinf(out.scale_backprop[0])
    assert np.isnan(out.scale_backprop[1])
    assert out.scale_backprop[2] == 0
    assert not np.isfinite(out.x_backprop[..., :2]).any()
    assert (out.x_backprop[..., 2] == 0).all()
    rejects(
        ValueError, r"reserve_space_2: an inverse standard deviation .* channel 1; got -0.5",
        gradient, b, reserve_space_2=np.array([1, -0.5, 1], "f"),
        reserve_space_2_is="inverse_standard_deviation",
    )  # fmt: skip


def test_gradient_without_training_rejects_inverse_standard_deviation(batch):
    rejects(
        ValueError, "reserve_space_2_is: is_training=False takes the population variance",
        gradient, batch(), is_training=False, reserve_space_2_is="inverse_standard_deviation",
    )  # fmt: skip
    rejects(ValueError, "reserve_space_2_is", gradient, batch(), reserve_space_2_is="std")


def test_gradient_with_variance_below_minus_epsilon_raises_error_of_reserve_space_2(batch):
    b = batch()
    b["variance"][2] = -2
    rejects(ValueError, r"reserve_space_2: .*channel 2.*-2", gradient, b)


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


@pytest.mark.parametrize("factor", [0.25, 0.0, 2.0])
def test_forward_weights_batch_statistics_by_exponential_avg_factor(batch, factor):
    b = batch()
    old = {"mean": np.array([5, -1, 2], "f"), "variance": np.array([7, 1, 3], "f")}
    alone = forward(b)
    out = forward(b, exponential_avg_factor=factor, **old)
    wide = b["x"].astype("d")
    # They are updated from the statistic before its rounding.
    for new, statistic, name in (
        (out.batch_mean, wide.mean((0, 1, 2)), "mean"),
        (out.batch_variance, wide.var((0, 1, 2), ddof=1), "variance"),
    ):
        expected = (1 - factor) * old[name].astype("d") + factor * statistic
        np.testing.assert_allclose(new, expected, rtol=2e-7)
    np.testing.assert_array_equal(out.reserve_space_1, alone.reserve_space_1)


def test_forward_ignores_unread_mean_and_variance_except_rank(batch, same):
    b = batch()
    wrong = np.full(7, np.nan, "f")
    same(forward(b, mean=wrong, variance=wrong), forward(b))
    rejects(ValueError, "mean: must be 1-dimensional", forward, b, mean=np.ones((1, 3), "f"))


@pytest.mark.parametrize("case", [{"is_training": False}, {"exponential_avg_factor": 0.9}])
@pytest.mark.parametrize("name", ["mean", "variance"])
def test_forward_with_wrong_size_of_read_statistics_raises_value_error(batch, case, name):
    b = batch()
    good = {"mean": b["mean"], "variance": b["variance"]}
    rejects(
        ValueError, rf"{name}: with .* must have the same number of elements.*got 0 and 3",
        forward, b, **(good | {name: EMPTY} | case),
    )  # fmt: skip


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


def test_forward_without_channels_returns_empty_outputs(batch):
    out = forward(batch((2, 3, 3, 0)))
    assert [o.shape for o in out] == [(2, 3, 3, 0), *[(0,)] * 5]


def test_dialect_module_does_not_import_frameworks():
    import subprocess
    import sys

    code = (
        "import sys, backnorm.dialects.tensorflow; "
        "sys.exit(any(m.split('.')[0] in ('tensorflow', 'torch', 'jax') for m in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
