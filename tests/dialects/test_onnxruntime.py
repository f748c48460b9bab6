"""ONNX Runtime's training operators."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from backnorm import BacknormError, batch_norm_forward, batch_norm_inference, reference
from backnorm.conformance.judge import judge
from backnorm.dialects import aten, onnxruntime

EPSILON = 1e-3
F32_EPSILON = float(np.float32(EPSILON))
TYPES = ("f64", "f32", "f16", "bf16")
ALLOWED = {(data, data) for data in TYPES} | {("f16", "f32"), ("bf16", "f32")}
SHAPE = (4, 3, 5, 2)


def inverse_of(b):
    return (1 / np.sqrt(b["variance"].astype(float) + EPSILON)).astype(b["variance"].dtype)


def grad(b, epsilon=EPSILON, **changes):
    operands = {"dY": b["dy"], "X": b["x"], "scale": b["gamma"], "saved_mean": b["mean"]}
    operands["saved_inv_std"] = inverse_of(b)
    return onnxruntime.BatchNormalizationGrad(*(operands | changes).values(), epsilon)


def forward(b, **changes):
    operands = {"X": b["x"], "scale": b["gamma"], "B": b["beta"], "input_mean": b["mean"]}
    operands["input_var"] = b["variance"]
    return onnxruntime.BatchNormInternal(**operands | {"epsilon": EPSILON} | changes)


def rejects(error_type, match, call):
    with pytest.raises(error_type, match=match) as error:
        call()
    assert isinstance(error.value, BacknormError)


@pytest.fixture
def b(batch):
    return batch(SHAPE, "NCX")


@pytest.mark.parametrize(("data", "channel"), list(itertools.product(TYPES, TYPES)))
def test_operators_accept_listed_types_only(batch, data, channel):
    b = batch(SHAPE, "NCX", data, channel)
    for call in (grad, forward):
        if (data, channel) in ALLOWED:
            first, *others = call(b)
            assert first.dtype == b["x"].dtype
            assert {o.dtype for o in others} == {b["mean"].dtype}
        else:
            rejects(TypeError, r"^(X|scale): ", lambda c=call: c(b))


@pytest.mark.parametrize("types", [*((t, t) for t in TYPES), ("f16", "f32"), ("bf16", "f32")])
def test_grad_is_within_error_budget_and_equals_aten(batch, same, types):
    b = batch(SHAPE, "NCX", *types)
    out, inverse = grad(b), inverse_of(b)
    exact = reference.backward(
        b["x"], b["dy"], b["mean"], 1 / inverse.astype(float) ** 2, b["gamma"], epsilon=0.0
    )
    for name, actual in zip(("dx", "dgamma", "dbeta"), out, strict=True):
        terms = getattr(exact, f"{name}_terms")
        verdict = judge(name, actual, getattr(exact, name), terms, b["x"].dtype)
        assert verdict.passed, verdict.detail
    theirs = aten.native_batch_norm_backward(
        b["dy"], b["x"], b["gamma"], None, None, b["mean"], inverse, True, 0.1, [True] * 3
    )
    same(out, theirs)


def test_grad_validates_but_ignores_epsilon(b, same):
    same(grad(b, 0.5), grad(b))
    rejects(ValueError, "epsilon: must be finite and not negative", lambda: grad(b, -1.0))
    rejects(TypeError, "epsilon: must be a real number", lambda: grad(b, "1"))


def test_operators_accept_scale_of_narrower_type_than_statistics(batch, same, dtypes):
    b = batch(SHAPE, "NCX", "bf16", "f32")
    mixed = b | {"gamma": b["gamma"].astype(dtypes["bf16"]), "beta": b["beta"].astype("f")}
    wide = mixed | {"gamma": mixed["gamma"].astype("f")}
    out, expected = grad(mixed), grad(wide)
    assert [str(o.dtype) for o in out] == ["bfloat16"] * 3
    same(out[:1], expected[:1])
    for ours, theirs in zip(out[1:], expected[1:], strict=True):
        np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=2**-8)
    assert [str(o.dtype) for o in forward(mixed)] == ["bfloat16"] + ["float32"] * 4


@pytest.mark.parametrize("name", ["dY", "X", "scale", "saved_mean", "saved_inv_std"])
def test_grad_without_required_input_raises_error_of_input(b, name):
    rejects(TypeError, f"{name}: is a required input", lambda: grad(b, **{name: None}))


def test_error_of_invalid_input_has_onnxruntime_names(b):
    rejects(ValueError, r"dY: must have the shape of X.*\(3, 3, 5, 2\)",
            lambda: grad(b, dY=b["dy"][:3]))  # fmt: skip
    rejects(TypeError, "dY: must have the element type of X",
            lambda: grad(b, dY=b["dy"].astype("d")))  # fmt: skip
    rejects(ValueError, "scale: must hold one value per channel of X",
            lambda: grad(b, scale=b["gamma"][:2]))  # fmt: skip
    rejects(ValueError, "saved_mean: must have rank 1",
            lambda: grad(b, saved_mean=b["mean"][None]))  # fmt: skip
    rejects(ValueError, "X: must have rank 2 or more",
            lambda: grad(b, X=b["gamma"], dY=b["gamma"]))  # fmt: skip
    negative = np.array([1, -1, 1], "f")
    rejects(ValueError, "saved_inv_std: .*cannot be negative.*channel 1; got -1",
            lambda: grad(b, saved_inv_std=negative))  # fmt: skip
    rejects(ValueError, "input_mean: must hold one value", lambda: forward(b, input_mean=b["x"][0]
            [0, 0]))  # fmt: skip


@pytest.mark.parametrize("dtype", TYPES)
def test_forward_matches_canonical_forward_and_numpy(batch, same, dtype):
    b, old = batch(SHAPE, "NCX", dtype), batch(SHAPE, "NCX", dtype, seed=1)
    epsilon = float(np.float32(EPSILON))
    y, mean, _ = batch_norm_forward(b["x"], b["gamma"], b["beta"], epsilon=epsilon)
    out = forward(b, input_mean=old["mean"], input_var=old["variance"], momentum=0.75)
    same((out[0], out[3]), (y, mean))
    wide = b["x"].astype("d")
    # The variance of the population, of the same digits as the input's.
    tolerance = {"f64": 1e-14, "f32": 1e-6, "f16": 1e-3, "bf16": 1e-2}[dtype]
    batch_mean, batch_variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    for running, before, now in (
        (out[1], old["mean"], batch_mean),
        (out[2], old["variance"], batch_variance),
    ):
        expected = 0.75 * before.astype("d") + 0.25 * now
        np.testing.assert_allclose(running.astype("d"), expected, rtol=tolerance)
    expected = 1 / np.sqrt(batch_variance + epsilon)
    np.testing.assert_allclose(out[4].astype("d"), expected, rtol=tolerance)


def test_saved_inverse_deviation_is_rounded_once(batch):
    b = batch((64, 3, 5), "NCX")
    exact = reference.forward(b["x"], b["gamma"], b["beta"], epsilon=F32_EPSILON)
    inverse = 1 / np.sqrt(exact.variance.hi + F32_EPSILON)
    np.testing.assert_array_equal(forward(b)[4], inverse.astype("f"))


def test_grad_with_statistics_saved_by_forward_matches_reference(b):
    _, _, _, saved_mean, saved_inv_std = forward(b)
    dx, *_ = grad(b, saved_mean=saved_mean, saved_inv_std=saved_inv_std)
    exact = reference.backward(
        b["x"], b["dy"], saved_mean, b["x"].astype("d").var((0, 2, 3)), b["gamma"], epsilon=EPSILON
    )
    np.testing.assert_allclose(dx, exact.dx.hi, rtol=1e-4, atol=1e-6)


def test_momentum_defaults_to_nine_tenths_and_weights_old_statistics(b, same):
    same(forward(b), forward(b, momentum=0.9))
    same(forward(b, momentum=1.0)[1:3], (b["mean"], b["variance"]))


def test_forward_without_training_mode_uses_given_statistics(b, same):
    out = forward(b, training_mode=0)
    y = batch_norm_inference(
        b["x"], b["mean"], b["variance"], b["gamma"], b["beta"], epsilon=F32_EPSILON
    )
    same((out[0], *out[1:4]), (y, b["mean"], b["variance"], b["mean"]))
    expected = 1 / np.sqrt(b["variance"].astype("d") + F32_EPSILON)
    np.testing.assert_array_equal(out[4], expected.astype("f"))


@pytest.mark.parametrize(
    ("mode", "error", "match"),
    [(2, ValueError, "unknown mode; got 2"), (-1, ValueError, "must be not negative"),
     (True, TypeError, "must be an integer"), ("1", TypeError, "must be an integer")],
)  # fmt: skip
def test_training_mode_other_than_0_or_1_is_rejected(b, mode, error, match):
    rejects(error, f"training_mode: {match}", lambda: forward(b, training_mode=mode))


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4)])
def test_empty_input_gives_zero_gradients_and_keeps_running_statistics(batch, same, shape):
    b = batch(shape, "NCX")
    zeros = np.zeros(shape[1], "f")
    same(grad(b), (b["x"], zeros, zeros))
    out = forward(b)
    same(out[:3], (b["x"], b["mean"], b["variance"]))
