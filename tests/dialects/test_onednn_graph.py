from __future__ import annotations

import itertools

import numpy as np
import pytest

from backnorm import BacknormError, batch_norm_backward, batch_norm_forward
from backnorm.dialects.onednn_graph import (
    BatchNormForwardTraining,
    BatchNormInference,
    BatchNormTrainingBackward,
)

ALLOWED = {("f32", "f32"), ("bf16", "f32"), ("bf16", "bf16"), ("f16", "f32")}
TYPES = ("f64", "f32", "f16", "bf16")
CLASSES = (BatchNormTrainingBackward, BatchNormForwardTraining, BatchNormInference)


def inputs(b, *names):
    return [b[name] for name in names]


BACKWARD = ("x", "dy", "mean", "variance", "gamma")
FORWARD = ("x", "mean", "variance", "gamma", "beta")
INFERENCE = ("x", "gamma", "beta", "mean", "variance")


@pytest.mark.parametrize(("data", "channel"), list(itertools.product(TYPES, TYPES)))
def test_operators_accept_listed_type_combinations_only(batch, data, channel):
    b = batch(dtype=data, channel=channel)
    for cls, names in zip(CLASSES, (BACKWARD, FORWARD, INFERENCE), strict=True):
        if (data, channel) in ALLOWED:
            out = cls(1e-5)(*inputs(b, *names))
            assert out[0].dtype == b["x"].dtype
            assert all(o.dtype == b["mean"].dtype for o in out[1:])
        else:
            with pytest.raises(TypeError, match=r"src|mean|gamma") as error:
                cls(1e-5)(*inputs(b, *names))
            assert isinstance(error.value, BacknormError)


@pytest.mark.parametrize("odd", ["variance", "gamma"])
def test_backward_with_different_channel_types_raises_type_error(batch, odd):
    b = batch(dtype="bf16", channel="f32")
    b[odd] = b[odd].astype(b["x"].dtype)
    with pytest.raises(TypeError, match=rf"{odd}: must have the element type of mean"):
        BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD))


def test_backward_with_wrong_diff_dst_type_raises_type_error(batch):
    b = batch()
    b["dy"] = b["dy"].astype("float16")
    with pytest.raises(TypeError, match=r"diff_dst: .*src.*float16.*f32"):
        BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD))


def test_data_format_defaults_to_nxc(batch, same):
    b = batch((3, 4, 4, 2))
    default = BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD))
    same(default, BatchNormTrainingBackward(1e-5, "NXC")(*inputs(b, *BACKWARD)))
    assert default[1].shape == (2,)
    assert BatchNormForwardTraining(1e-5).attributes["data_format"] == "NXC"
    assert BatchNormInference(1e-5).attributes["data_format"] == "NXC"


@pytest.mark.parametrize("cls", CLASSES)
def test_epsilon_is_required(cls):
    with pytest.raises(TypeError, match="epsilon: is a required attribute") as error:
        cls()
    assert isinstance(error.value, BacknormError)


@pytest.mark.parametrize("epsilon", [0, 0.0, -0.5, -1e-30, float("nan"), float("inf"), 1e-60, 1e60])
@pytest.mark.parametrize("cls", CLASSES)
def test_epsilon_not_finite_and_positive_as_float32_is_rejected(cls, epsilon):
    with pytest.raises(ValueError, match="epsilon: must be finite and positive") as error:
        cls(epsilon=epsilon)
    assert isinstance(error.value, BacknormError)


@pytest.mark.parametrize("epsilon", [True, "1e-5", None, 1j, [1e-5], np.zeros(1)])
def test_epsilon_of_wrong_type_raises_type_error(epsilon):
    with pytest.raises(TypeError, match="epsilon: must be a real number"):
        BatchNormTrainingBackward(epsilon=epsilon)


@pytest.mark.parametrize("data_format", ["NHWC", "nxc", "", "NCHW"])
def test_data_format_with_unknown_value_raises_value_error(data_format):
    with pytest.raises(ValueError, match=r"data_format.*'NCX' or 'NXC'"):
        BatchNormTrainingBackward(1e-5, data_format)


@pytest.mark.parametrize("data_format", [None, 1, b"NXC"])
def test_data_format_of_wrong_type_raises_type_error(data_format):
    with pytest.raises(TypeError, match="data_format: must be a string"):
        BatchNormTrainingBackward(1e-5, data_format)


@pytest.mark.parametrize("missing", ["src", "diff_dst", "mean", "variance"])
def test_backward_without_required_input_raises_error_of_input(batch, missing):
    b = batch()
    call = dict(zip(("src", "diff_dst", "mean", "variance"), inputs(b, *BACKWARD), strict=False))
    del call[missing]
    with pytest.raises(TypeError, match=f"{missing}: is a required input") as error:
        BatchNormTrainingBackward(1e-5)(**call)
    assert isinstance(error.value, BacknormError)


def test_backward_without_gamma_equals_gamma_of_ones(batch, same):
    b = batch()
    op = BatchNormTrainingBackward(1e-5)
    ones = np.ones_like(b["gamma"])
    same(op(*inputs(b, *BACKWARD[:4])), op(*inputs(b, *BACKWARD[:4]), ones))


def test_backward_outputs_by_name_or_number_select_results(batch, same):
    b = batch()
    op = BatchNormTrainingBackward(1e-5)
    full = op(*inputs(b, *BACKWARD))
    same(op(*inputs(b, *BACKWARD), outputs=("diff_beta", "diff_src", "diff_gamma")), full)
    assert len(op(*inputs(b, *BACKWARD), outputs=1)) == 1


@pytest.mark.parametrize("outputs", [2, ("diff_src", "diff_gamma"), ("diff_src", "diff_beta")])
def test_backward_outputs_with_one_parameter_gradient_are_rejected(batch, outputs):
    with pytest.raises(ValueError, match="diff_gamma and diff_beta must be requested together"):
        BatchNormTrainingBackward(1e-5)(*inputs(batch(), *BACKWARD), outputs=outputs)


@pytest.mark.parametrize("outputs", [0, 4, -1, ("dst",), ("diff_gamma", "diff_beta"), ()])
def test_backward_with_invalid_outputs_raises_value_error(batch, outputs):
    with pytest.raises(ValueError, match="outputs"):
        BatchNormTrainingBackward(1e-5)(*inputs(batch(), *BACKWARD), outputs=outputs)


@pytest.mark.parametrize("outputs", [True, "diff_src", 1.0])
def test_backward_with_outputs_of_wrong_type_raises_type_error(batch, outputs):
    with pytest.raises(TypeError, match="outputs"):
        BatchNormTrainingBackward(1e-5)(*inputs(batch(), *BACKWARD), outputs=outputs)


def test_backward_with_one_output_equals_training_gradient_without_gamma(batch, same):
    b = batch()
    (alone,) = BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD), outputs=1)
    expected = batch_norm_backward(
        *inputs(b, *BACKWARD[:4]), epsilon=float(np.float32(1e-5)), data_format="NXC"
    )
    same((alone,), (expected.dx,))


def test_single_output_onednn_equals_frozen_gradient_without_gamma(batch, same):
    b = batch()
    op = BatchNormTrainingBackward(1e-5, single_output="onednn")
    (alone,) = op(*inputs(b, *BACKWARD), outputs=1)
    epsilon = float(np.float32(1e-5))
    frozen = batch_norm_backward(
        *inputs(b, *BACKWARD[:4]), epsilon=epsilon, data_format="NXC", training=False
    )
    same((alone,), (frozen.dx,))
    s = 1 / np.sqrt(b["variance"].astype(np.float64) + epsilon)
    np.testing.assert_allclose(alone, b["dy"] * s, rtol=1e-6)
    # With all outputs it is the training formula.
    full = BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD))
    same(op(*inputs(b, *BACKWARD)), full)


def test_single_output_with_unknown_value_raises_value_error():
    with pytest.raises(ValueError, match="single_output"):
        BatchNormTrainingBackward(1e-5, single_output="frozen")


def test_backward_in_place_over_diff_dst_equals_out_of_place(batch, same):
    b = batch()
    op = BatchNormTrainingBackward(1e-5)
    expected = op(*inputs(b, *BACKWARD))
    memory = b["dy"].copy()
    out = op(b["x"], memory, b["mean"], b["variance"], b["gamma"], diff_src=memory)
    assert out[0] is memory
    same(out, expected)


def test_backward_with_invalid_diff_src_raises_error_of_diff_src(batch):
    b = batch()
    op = BatchNormTrainingBackward(1e-5)
    with pytest.raises(TypeError, match="diff_src"):
        op(*inputs(b, *BACKWARD), diff_src=[1.0])
    with pytest.raises(ValueError, match="diff_src"):
        op(*inputs(b, *BACKWARD), diff_src=np.empty((1, 2), "f"))
    with pytest.raises(ValueError, match="diff_src"):
        op(*inputs(b, *BACKWARD), diff_src=b["x"])
    with pytest.raises(TypeError, match="diff_src"):
        op(*inputs(b, *BACKWARD), diff_src=np.empty(b["x"].shape, "float64"))


@pytest.mark.parametrize("shape", [(0, 4, 4, 3), (2, 0, 4, 3), (2, 4, 4, 0), (0, 3), (0, 0)])
def test_backward_of_empty_input_returns_zero_gradients(batch, shape):
    b = batch(shape)
    out = BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD))
    assert out[0].shape == shape
    for gradient in out[1:]:
        assert gradient.shape == shape[-1:]
        assert (gradient == 0).all()


@pytest.mark.parametrize("shape", [(), (3,)])
def test_backward_of_rank_below_2_raises_value_error(batch, shape):
    x = np.ones(shape, "f")
    c = np.ones(3, "f")
    with pytest.raises(ValueError, match=r"src: must have rank 2 or more"):
        BatchNormTrainingBackward(1e-5)(x, x, c, c)


def test_backward_with_wrong_shape_raises_error_with_dialect_names(batch):
    b = batch()
    op = BatchNormTrainingBackward(1e-5)
    with pytest.raises(ValueError, match=r"diff_dst: must have the shape of src.*\(2, 5, 5, 3\)"):
        op(b["x"], b["dy"][:2], b["mean"], b["variance"])
    with pytest.raises(ValueError, match=r"mean: must hold one value per channel of src"):
        op(b["x"], b["dy"], b["mean"][:2], b["variance"])
    with pytest.raises(ValueError, match=r"gamma: must hold one value per channel of src"):
        op(b["x"], b["dy"], b["mean"], b["variance"], b["gamma"][:2])
    with pytest.raises(ValueError, match=r"variance: must have rank 1"):
        op(b["x"], b["dy"], b["mean"], b["variance"][None])


def test_backward_with_variance_below_minus_epsilon_raises_error_of_channel(batch):
    b = batch()
    b["variance"][1] = -1
    with pytest.raises(ValueError, match=r"variance.*channel 1.*-1") as error:
        BatchNormTrainingBackward(1e-5)(*inputs(b, *BACKWARD))
    assert isinstance(error.value, BacknormError)


@pytest.mark.parametrize("momentum", [0.25, None, 1.0])
def test_forward_updates_running_statistics_from_unrounded_batch_statistics(batch, same, momentum):
    b, old = batch(), batch(seed=1)
    op = BatchNormForwardTraining(1e-5, momentum)
    out = op(b["x"], old["mean"], old["variance"], b["gamma"], b["beta"])
    weight = 0.5 if momentum is None else momentum
    x = b["x"].reshape(-1, b["x"].shape[-1]).astype(np.float64)
    exact = {"mean": x.mean(0), "variance": x.var(0)}
    for running, (name, statistic) in zip(out[1:3], exact.items(), strict=True):
        wide = weight * old[name].astype(np.float64)
        # They are updated from the statistic before its rounding.
        wide += (1 - weight) * statistic
        same((running,), (wide.astype(np.float32),))


def test_forward_of_empty_batch_keeps_running_statistics(batch, same):
    b = batch((0, 4, 3))
    out = BatchNormForwardTraining(1e-5, 0.5)(*inputs(b, *FORWARD))
    same(out[1:3], (b["mean"], b["variance"]))
    same(out[3:], (np.zeros(3, "f"), np.zeros(3, "f")))


def test_forward_rejects_gamma_without_beta_and_accepts_neither(batch, same):
    b = batch()
    op = BatchNormForwardTraining(1e-5)
    with pytest.raises(ValueError, match="gamma and beta must be given together"):
        op(b["x"], b["mean"], b["variance"], b["gamma"])
    plain = op(b["x"], b["mean"], b["variance"])
    expected = batch_norm_forward(b["x"], epsilon=float(np.float32(1e-5)), data_format="NXC")
    same((plain[0], *plain[3:]), expected)


def test_forward_without_gamma_returns_statistics_of_type_of_mean(batch, dtypes):
    b = batch(dtype="bf16", channel="bf16")
    out = BatchNormForwardTraining(1e-5)(b["x"], b["mean"], b["variance"])
    assert [o.dtype for o in out[1:]] == [dtypes["bf16"]] * 4


@pytest.mark.parametrize("momentum", [0, -0.1, float("nan")])
def test_momentum_that_is_not_positive_raises_value_error(momentum):
    with pytest.raises(ValueError, match="momentum"):
        BatchNormForwardTraining(1e-5, momentum)


@pytest.mark.parametrize("missing", range(5))
def test_inference_without_required_input_raises_error_of_input(batch, missing):
    call = inputs(batch(), *INFERENCE)
    call[missing] = None
    name = ("src", "gamma", "beta", "mean", "variance")[missing]
    with pytest.raises(TypeError, match=f"{name}: is a required input"):
        BatchNormInference(1e-5)(*call)


def test_forward_and_inference_write_to_dst(batch, same):
    b = batch()
    forward, inference = BatchNormForwardTraining(1e-5), BatchNormInference(1e-5)
    dst = np.full_like(b["x"], np.nan)
    expected = forward(*inputs(b, *FORWARD))
    assert forward(*inputs(b, *FORWARD), dst=dst)[0] is dst
    same((dst,), expected[:1])
    expected = inference(*inputs(b, *INFERENCE))
    assert inference(*inputs(b, *INFERENCE), dst=dst)[0] is dst
    same((dst,), expected)


@pytest.mark.parametrize(
    ("op", "names"), [(BatchNormForwardTraining, FORWARD), (BatchNormInference, INFERENCE)]
)
def test_dst_that_is_src_receives_the_same_bits(batch, same, op, names):
    src, *others = inputs(batch(), *names)
    expected = op(1e-5)(src.copy(), *others)
    results = op(1e-5)(src, *others, dst=src)
    assert results[0] is src
    same(results, expected)
    with pytest.raises(ValueError, match="dst: overlaps part of src"):
        op(1e-5)(src, *others, dst=src[::-1])
