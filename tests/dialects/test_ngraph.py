from __future__ import annotations

import itertools

import numpy as np
import pytest

from backnorm import BacknormError
from backnorm.dialects import ngraph

TYPES = ("f64", "f32", "f16", "bf16")
ORDER = ("x", "gamma", "beta", "mean", "variance", "dy")
NODE_ORDER = ("gamma", "beta", "x", "mean", "variance", "dy")
SHAPE = (4, 3, 5)


def call(b, epsilon=1e-3, **changes):
    values = [changes.get(name, b[name]) for name in ORDER]
    return ngraph.BatchNormTrainingBackprop(*values, epsilon)


def rejects(error_type, match, b, **changes):
    with pytest.raises(error_type, match=match) as error:
        call(b, **changes)
    assert isinstance(error.value, BacknormError)


@pytest.fixture
def b(batch):
    return batch(SHAPE, "NCX")


@pytest.mark.parametrize(("data", "channel"), list(itertools.product(TYPES, TYPES)))
def test_backprop_requires_equal_data_and_channel_types(batch, data, channel):
    b = batch(SHAPE, "NCX", data, channel)
    if data == channel:
        assert {o.dtype for o in call(b)} == {b["x"].dtype}
    else:
        rejects(TypeError, "gamma: element types do not match", b)


@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64"])
def test_backprop_of_unsupported_element_type_raises_type_error(b, dtype):
    cast = {name: array.astype(dtype) for name, array in b.items()}
    rejects(TypeError, r"input: unsupported element type.*f16, bf16, f32, f64", cast)


def test_from_node_order_equals_documented_order(b, same):
    node_order = ngraph.BatchNormTrainingBackprop.from_node_order
    same(node_order(*[b[name] for name in NODE_ORDER], 1e-3), call(b))
    x, gamma, beta = b["x"], b["gamma"], b["beta"]
    same(
        ngraph.BatchNormTraining.from_node_order(gamma, beta, x, 1e-3),
        ngraph.BatchNormTraining(x, gamma, beta, 1e-3),
    )
    mean, variance = b["mean"], b["variance"]
    same(
        (ngraph.BatchNormInference.from_node_order(gamma, beta, x, mean, variance, 1e-3),),
        (ngraph.BatchNormInference(x, gamma, beta, mean, variance, 1e-3),),
    )


def test_backprop_ignores_values_of_beta(b, same):
    same(call(b, beta=b["beta"] + 7), call(b))


def test_backprop_with_wrong_shape_or_type_of_beta_raises_error_of_beta(b):
    rejects(ValueError, "beta: shapes for gamma/beta/mean/variance do not match", b,
            beta=b["beta"][:2])  # fmt: skip
    rejects(TypeError, "beta: element types do not match", b, beta=b["beta"].astype("float64"))


def test_backprop_with_wrong_delta_shape_raises_error_with_both_shapes(b):
    rejects(
        ValueError,
        r"delta: shape of delta does not match the shape of the input.*\(3, 3, 5\).*\(4, 3, 5\)",
        b, dy=b["dy"][:3],
    )  # fmt: skip


def test_backprop_with_wrong_delta_type_raises_error_with_both_types(b):
    rejects(
        TypeError,
        r"delta: element type for input does not match element type for delta.*float64.*f32",
        b, dy=b["dy"].astype("float64"),
    )  # fmt: skip


def test_backprop_of_rank_1_input_raises_value_error(b):
    vector = b["x"][0, 0]
    rejects(ValueError, "input: must have rank of at least 2.*rank 1", b, x=vector, dy=vector)


@pytest.mark.parametrize("name", ["gamma", "beta", "mean", "variance"])
def test_backprop_with_one_wrong_channel_shape_raises_error_of_operand(b, name):
    for bad in (b[name][:2], np.append(b[name], b[name]), b[name][None], b[name][:0]):
        rejects(
            ValueError, f"{name}: shapes for gamma/beta/mean/variance do not match", b,
            **{name: bad},
        )  # fmt: skip


def test_backprop_with_all_channel_shapes_wrong_raises_value_error(b):
    channel = ("gamma", "beta", "mean", "variance")
    rejects(
        ValueError, "shape for gamma/beta/mean/variance does not have rank 1", b,
        **{name: b[name][None] for name in channel},
    )  # fmt: skip
    rejects(
        ValueError,
        r"input channel dimension \(3\) does not match shape for gamma/beta/mean/variance \(2,\)",
        b, **{name: b[name][:2] for name in channel},
    )  # fmt: skip


def test_operators_without_channels_raise_value_error(batch):
    b = batch((4, 0, 5), "NCX")
    rejects(ValueError, "input: channel count must be at least 1", b)
    with pytest.raises(ValueError, match="channel count must be at least 1"):
        ngraph.BatchNormTraining(b["x"], b["gamma"], b["beta"], 1e-3)
    with pytest.raises(ValueError, match="channel count must be at least 1"):
        ngraph.BatchNormInference(*[b[name] for name in ORDER[:5]], 1e-3)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0)])
def test_backprop_of_empty_input_returns_zero_gradients(batch, shape):
    out = call(batch(shape, "NCX"))
    assert out[0].shape == shape
    for gradient in out[1:]:
        assert gradient.tolist() == [0.0, 0.0, 0.0]


def test_backprop_accepts_epsilon_zero_and_rejects_invalid_epsilon(b):
    call(b, epsilon=0.0)
    call(b, epsilon=1e-60)
    for epsilon in (-1e-60, float("nan"), float("inf")):
        rejects(ValueError, "epsilon: must be finite and not negative", b, epsilon=epsilon)
    rejects(TypeError, "epsilon: must be a real number", b, epsilon="0.1")


@pytest.mark.parametrize("missing", range(7))
def test_backprop_without_required_argument_raises_error_of_argument(b, missing):
    words = ("input", "gamma", "beta", "mean", "variance", "delta", "epsilon")
    keywords = dict(zip(words, [*(b[name] for name in ORDER), 1e-3], strict=True))
    del keywords[words[missing]]
    with pytest.raises(TypeError, match=f"{words[missing]}: is a required") as error:
        ngraph.BatchNormTrainingBackprop(**keywords)
    assert isinstance(error.value, BacknormError)


def test_backprop_in_place_over_delta_equals_out_of_place(b, same):
    expected = call(b)
    memory = b["dy"].copy()
    args = [b["x"], b["gamma"], b["beta"], b["mean"], b["variance"], memory]
    out = ngraph.BatchNormTrainingBackprop(*args, 1e-3, input_delta=memory)
    assert out[0] is memory
    same(out, expected)


def test_forward_and_inference_write_to_normalized(b, same):
    memory = np.full_like(b["x"], np.nan)
    args = [b[name] for name in ORDER[:5]]
    expected = ngraph.BatchNormInference(*args, 1e-3)
    assert ngraph.BatchNormInference(*args, 1e-3, normalized=memory) is memory
    same((memory,), (expected,))
    expected = ngraph.BatchNormTraining(*args[:3], 1e-3)
    assert ngraph.BatchNormTraining(*args[:3], 1e-3, normalized=memory)[0] is memory
    same((memory,), expected[:1])


def test_forward_returns_biased_variance(b):
    _, _, variance = ngraph.BatchNormTraining(b["x"], b["gamma"], b["beta"], 1e-3)
    np.testing.assert_allclose(variance, b["x"].astype("d").var((0, 2)), rtol=1e-6)


def test_backprop_of_float64_with_one_int32_operand_raises_type_error(batch):
    # NumPy compares float64 equal to None, which once let any unsupported type through here.
    b = batch(SHAPE, "NCX", "f64")
    rejects(TypeError, "delta: element type for input", b, dy=b["dy"].astype("int32"))
    rejects(TypeError, "input: unsupported element type", b, x=b["x"].astype("int32"))


def test_backprop_with_array_as_epsilon_raises_error_with_its_shape_not_its_elements(rng):
    x, channel = rng.standard_normal((2, 3, 4, 4), dtype=np.float32), np.ones(3, np.float32)
    with pytest.raises(TypeError, match="epsilon: must be a real number") as caught:
        # The order of arguments of another operator.
        ngraph.BatchNormTrainingBackprop(x, channel, channel, channel, channel, 1e-5, x)
    assert "got an array of shape (2, 3, 4, 4) and dtype float32" in str(caught.value)
    assert str(x[0, 0, 0, 0]) not in str(caught.value)
