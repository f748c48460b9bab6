"""StableHLO: any rank from 1 up, and any axis for the features."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm import batch_norm_backward, batch_norm_forward, batch_norm_inference
from backnorm.dialects import registry, stablehlo

EPSILON = 1e-3
F32_EPSILON = float(np.float32(EPSILON))
TYPES = ("f64", "f32", "f16", "bf16")
SHAPES = [(7, 3), (3, 4, 5), (2, 3, 5, 4), (2, 3, 2, 4, 3), (2, 2, 3, 2, 2, 3)]
AXES = [(shape, axis) for shape in SHAPES for axis in range(len(shape))]


def moved(b, axis):
    """Return the batch with its channel axis, the second, at `axis`; in C order there."""
    data = {name: np.moveaxis(b[name], 1, axis).copy() for name in ("x", "dy")}
    return b | data


def batch_at(batch, shape, axis, dtype="f32"):
    """Return a batch of `shape` with its channels at `axis`."""
    others = [n for k, n in enumerate(shape) if k != axis]
    return moved(batch((others[0], shape[axis], *others[1:]), "NCX", dtype), axis)


def grad(b, axis, **changes):
    names = {"operand": "x", "scale": "gamma", "mean": "mean", "variance": "variance"}
    operands = {name: b[key] for name, key in names.items()} | {"grad_output": b["dy"]}
    attributes = {"epsilon": EPSILON, "feature_index": axis}
    return stablehlo.batch_norm_grad(**operands | attributes | changes)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "axis"), AXES)
def test_operators_with_any_feature_index_equal_canonical_operators(batch, dtype, shape, axis):
    b = batch_at(batch, shape, axis, dtype)
    assert b["x"].shape == shape
    ncx = {name: np.moveaxis(b[name], axis, 1) for name in ("x", "dy")}
    options = {"epsilon": F32_EPSILON}
    dx, dgamma, dbeta = batch_norm_backward(
        ncx["x"], ncx["dy"], b["mean"], b["variance"], b["gamma"], **options
    )
    grad_operand, grad_scale, grad_offset = grad(b, axis)
    np.testing.assert_array_equal(grad_operand, np.moveaxis(dx, 1, axis))
    np.testing.assert_array_equal(grad_scale, dgamma)
    np.testing.assert_array_equal(grad_offset, dbeta)
    assert grad_operand.strides == b["x"].strides

    affine = (b["gamma"], b["beta"])
    y, mean, variance = batch_norm_forward(ncx["x"], *affine, **options)
    output, *statistics = stablehlo.batch_norm_training(b["x"], *affine, EPSILON, axis)
    np.testing.assert_array_equal(output, np.moveaxis(y, 1, axis))
    np.testing.assert_array_equal(statistics, [mean, variance])
    y = batch_norm_inference(ncx["x"], b["mean"], b["variance"], *affine, **options)
    result = stablehlo.batch_norm_inference(
        b["x"], *affine, b["mean"], b["variance"], EPSILON, axis
    )
    np.testing.assert_array_equal(result, np.moveaxis(y, 1, axis))


@pytest.mark.parametrize("dtype", TYPES)
def test_operators_of_rank_1_equal_batch_of_one(batch, dtype):
    b = batch((1, 5), "NCX", dtype)
    flat = b | {"x": b["x"][0], "dy": b["dy"][0], "mean": b["mean"] + b["mean"].dtype.type(0.25)}
    options = {"epsilon": F32_EPSILON}
    expected = batch_norm_backward(
        b["x"], b["dy"], flat["mean"], b["variance"], b["gamma"], **options
    )
    grad_operand, *others = grad(flat, 0)
    assert grad_operand.shape == (5,)
    np.testing.assert_array_equal(grad_operand, expected.dx[0])
    np.testing.assert_array_equal(others, expected[1:])
    output, mean, variance = stablehlo.batch_norm_training(
        flat["x"], b["gamma"], b["beta"], EPSILON, 0
    )
    np.testing.assert_array_equal(output, b["beta"])
    np.testing.assert_array_equal(mean, flat["x"])
    np.testing.assert_array_equal(variance.astype(float), 0.0)
    result = stablehlo.batch_norm_inference(
        flat["x"], b["gamma"], b["beta"], flat["mean"], b["variance"], EPSILON, 0
    )
    assert result.shape == (5,)


def test_invoke_writes_grad_operand_to_out_at_any_feature_index(batch):
    for shape, axis in [*AXES, ((5,), 0)]:
        b = batch((1, 5), "NCX") if shape == (5,) else batch_at(batch, shape, axis)
        if shape == (5,):
            b |= {"x": b["x"][0], "dy": b["dy"][0]}
        inputs = {"operand": b["x"], "scale": b["gamma"], "mean": b["mean"],
                  "variance": b["variance"], "grad_output": b["dy"]}  # fmt: skip
        attributes = {"epsilon": EPSILON, "feature_index": axis}
        out = np.full_like(b["x"], np.nan)
        results = registry.operator("stablehlo", "batch_norm_grad").invoke(
            inputs, attributes, out=out
        )
        assert results["grad_operand"] is out
        np.testing.assert_array_equal(out, grad(b, axis)[0])
        with pytest.raises(ValueError, match="grad_operand: "):
            registry.operator("stablehlo", "batch_norm_grad").invoke(
                inputs, attributes, out=out[..., None]
            )


def test_batch_norm_grad_keeps_strides_of_operand(batch):
    b = batch_at(batch, (2, 3, 5, 4), 2)
    turned = np.asfortranarray(b["x"])
    grad_operand, *_ = grad(b, 2, operand=turned)
    assert grad_operand.strides == turned.strides
    np.testing.assert_allclose(grad_operand, grad(b, 2)[0], rtol=1e-6, atol=1e-7)
