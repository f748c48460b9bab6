"""CANN: two operators, and formats with the channels in two axes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from backnorm import batch_norm_backward, reference
from backnorm.conformance.judge import judge
from backnorm.dialects.cann import BNTrainingReduceGrad, BNTrainingUpdateGrad

from .parts import EPSILON, check_input_gradient, inputs_of

F32_EPSILON = float(np.float32(EPSILON))
TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
# Shapes of the data, and the axes of the channels.
FORMATS = [
    ("ND", (7, 3), (1,)),
    ("ND", (4, 3, 5), (1,)),
    ("ND", (2, 3, 2, 2, 3, 2), (1,)),
    ("NCHW", (2, 3, 4, 5), (1,)),
    ("NHWC", (2, 4, 5, 3), (3,)),
    ("NCDHW", (2, 3, 2, 4, 3), (1,)),
    ("NC1HWC0", (2, 3, 4, 3, 16), (1, 4)),
    ("NDC1HWC0", (2, 2, 3, 2, 3, 16), (2, 5)),
]
UPDATE = "grads", "x", "batch_mean", "batch_variance"
REDUCE = "grads", "x", "diff_scale", "diff_offset", "scale", "batch_mean", "batch_variance"
ROLES = {"grads": "dy", "batch_mean": "mean", "batch_variance": "variance", "scale": "gamma"}


def named(operands, format, names, **values):
    """Return arguments; per-channel tensors have one axis if the channels have."""
    arrays = {name: operands.get(ROLES.get(name, name)) for name in names} | values
    if format not in ("NC1HWC0", "NDC1HWC0"):
        arrays |= {n: a.reshape(-1) for n, a in arrays.items() if n not in ("grads", "x")}
    return arrays


def update(operands, format, /, **changes):
    options = {"epsilon": EPSILON, "format": format}
    return BNTrainingUpdateGrad(**named(operands, format, UPDATE) | options | changes)


def reduce(operands, format, sums, /, **changes):
    options = {"epsilon": EPSILON, "format": format}
    between = dict(zip(REDUCE[2:4], sums, strict=True))
    return BNTrainingReduceGrad(**named(operands, format, REDUCE, **between) | options | changes)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("format", "shape", "kept"), FORMATS)
def test_gradients_in_each_format_are_within_budget(format, shape, kept, dtype):
    operands = inputs_of(shape, kept, dtype, np.float32)
    sums = update(operands, format)
    others = [axis for axis in range(len(shape)) if axis not in kept]
    count = math.prod(shape[axis] for axis in others)
    x, dy = (operands[n].transpose([*others, *kept]).reshape(count, -1) for n in ("x", "dy"))
    channels = [operands[n].reshape(-1) for n in ("mean", "variance", "gamma")]
    exact = reference.backward(x, dy, *channels, epsilon=F32_EPSILON)
    whole = batch_norm_backward(x, dy, *channels, epsilon=F32_EPSILON)
    expected = operands["mean"].shape if format.endswith("C0") else (operands["mean"].size,)
    for name, array in zip(("dgamma", "dbeta"), sums, strict=True):
        assert (array.dtype, array.shape) == (np.float32, expected)
        terms = getattr(exact, f"{name}_terms")
        verdict = judge(name, array.reshape(-1), getattr(exact, name), terms, operands["x"].dtype)
        assert verdict.passed, verdict.detail
        if dtype is np.float32:
            # In 16 bits, elements are computed in float32, in another order in another layout.
            np.testing.assert_array_equal(array.reshape(-1), getattr(whole, name))
    y = reduce(operands, format, sums)
    assert (y.dtype, y.shape) == (operands["x"].dtype, shape)
    spread = [array.reshape(operands["mean"].shape) for array in sums]
    check_input_gradient(y, operands, *spread, EPSILON)


def test_nc1hwc0_gradients_have_the_bits_of_nchw():
    operands = inputs_of((2, 32, 3, 4), (1,), np.float32)
    sums = update(operands, "NCHW")
    y = reduce(operands, "NCHW", sums)

    def split(array):
        n, _, h, w = array.shape
        return np.ascontiguousarray(array.reshape(n, 2, 16, h, w).transpose(0, 1, 3, 4, 2))

    moved = {name: split(array) for name, array in operands.items()}
    others = update(moved, "NC1HWC0")
    for one, other in zip(sums, others, strict=True):
        np.testing.assert_array_equal(one, other.reshape(-1))
    np.testing.assert_array_equal(reduce(moved, "NC1HWC0", others), split(y))


def test_reduce_grad_with_large_mean_is_within_budget():
    operands = inputs_of((64, 3, 5), (1,), np.float32)
    shift = np.float32(2**13)
    moved = operands | {"x": operands["x"] + shift, "mean": operands["mean"] + shift}
    moved["mean"] = moved["x"].astype(float).mean((0, 2), keepdims=True).astype("f")
    sums = update(moved, "ND")
    spread = [array.reshape(moved["mean"].shape) for array in sums]
    check_input_gradient(reduce(moved, "ND", sums), moved, *spread, EPSILON)


def test_reduce_grad_uses_given_sums():
    operands = inputs_of((4, 3, 5), (1,), np.float32)
    sums = update(operands, "ND")
    y = reduce(operands, "ND", sums)
    for k in range(2):
        other = [array + (k == place) for place, array in enumerate(sums)]
        assert np.abs(reduce(operands, "ND", other) - y).max() > 1e-3


def test_gradients_of_channels_last_memory_equal_contiguous():
    operands = inputs_of((4, 3, 5, 2), (1,), np.float32)
    sums = update(operands, "NCHW")
    last = {n: np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
            for n, a in operands.items()}  # fmt: skip
    for one, other in zip(sums, update(last, "NCHW"), strict=True):
        np.testing.assert_array_equal(one, other)
    y = reduce(last, "NCHW", sums)
    np.testing.assert_array_equal(y, reduce(operands, "NCHW", sums))


def test_arithmetic_of_float32_data_defaults_to_float64():
    operands = inputs_of((64, 3, 5), (1,), np.float32)
    sums = update(operands, "ND")
    for one, other in zip(sums, update(operands, "ND", arithmetic="float64"), strict=True):
        np.testing.assert_array_equal(one, other)
    y = reduce(operands, "ND", sums)
    np.testing.assert_array_equal(reduce(operands, "ND", sums, arithmetic="float64"), y)
    narrow = reduce(operands, "ND", sums, arithmetic="float32")
    np.testing.assert_allclose(narrow, y, rtol=1e-5, atol=1e-5)
