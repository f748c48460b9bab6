"""ONNX Runtime's training operators."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm import batch_norm_inference
from backnorm.dialects import onnxruntime

EPSILON = 1e-3
F32_EPSILON = float(np.float32(EPSILON))
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


@pytest.fixture
def b(batch):
    return batch(SHAPE, "NCX")


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


def test_forward_without_training_mode_uses_given_statistics(b, same):
    out = forward(b, training_mode=0)
    y = batch_norm_inference(
        b["x"], b["mean"], b["variance"], b["gamma"], b["beta"], epsilon=F32_EPSILON
    )
    same((out[0], *out[1:4]), (y, b["mean"], b["variance"], b["mean"]))
    expected = 1 / np.sqrt(b["variance"].astype("d") + F32_EPSILON)
    np.testing.assert_array_equal(out[4], expected.astype("f"))
    statistics = [b["mean"], b["variance"], *out[1:]]
    for k, array in enumerate(statistics):
        assert not any(np.may_share_memory(array, other) for other in statistics[:k])


@pytest.mark.parametrize("narrow", ["input_mean", "input_var"])
def test_forward_without_training_mode_returns_given_statistics_in_their_types(b, same, narrow):
    operands = {"X": b["x"], "input_mean": b["mean"], "input_var": b["variance"]}
    changes = {name: operands[name].astype("f2") for name in ("X", narrow)}
    statistics = [(operands | changes)[name] for name in ("input_mean", "input_var")]
    _, *running, mean, inverse = forward(b, **changes, training_mode=0)
    same((*running, mean), (*statistics, statistics[0]))
    assert inverse.dtype == statistics[1].dtype


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4)])
def test_empty_input_gives_zero_gradients_and_keeps_running_statistics(batch, same, shape):
    b = batch(shape, "NCX")
    zeros = np.zeros(shape[1], "f")
    same(grad(b), (b["x"], zeros, zeros))
    for momentum in (0.9, 0.0):
        out = forward(b, momentum=momentum)
        same(out[:3], (b["x"], b["mean"], b["variance"]))
