"""Operators with a ReLU accept arrays in any order of memory; the mask's bits follow that of x."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backnorm
from backnorm.activations import RELU
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, statistics_types
from tests.support.relu_battery import random_mask

TYPES = [(dtype, other) for dtype in ELEMENT_TYPES for other in statistics_types(dtype)]


def assert_passed(verdicts):
    assert [f"{k}: {v.detail}" for k, v in verdicts.items() if not v.passed] == []


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_relu_results_and_mask_follow_memory_order_of_x(dtype, order, rng):
    def lie(array):
        return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))

    data = realistic_data((5, 11, 7, 3), dtype, rng=rng)
    residual, dy = (rng.standard_normal(data.x.shape).astype(dtype) for _ in range(2))
    x = lie(data.x)
    # The residual and dy in x's order, and in their own.
    for turn in (lie, np.ascontiguousarray):
        added = data.options | {"residual": turn(residual)}
        result = backnorm.batch_norm_forward(x, data.gamma, data.beta, **added, activation="relu")
        assert result.y.strides == x.strides
        assert_passed(check_forward(x, data.gamma, data.beta, result, activation=RELU, **added))
        gradients = backnorm.batch_norm_backward(
            x, turn(dy), data.mean, data.variance, data.gamma,
            mask=result.mask, residual=True, **data.options,
        )  # fmt: skip
        assert gradients.dx.strides == gradients.dresidual.strides == x.strides
        assert_passed(
            check_backward(
                x, dy, data.mean, data.variance, data.gamma, gradients,
                mask=result.mask, residual=True, **data.options,
            )
        )  # fmt: skip


def every_second(array):
    wide = np.zeros([2 * n + 1 for n in array.shape], array.dtype)
    view = wide[tuple(slice(1, 2 * n + 1, 2) for n in array.shape)]
    view[...] = array
    return view


def backwards(array):
    flip = (slice(None, None, -1),) * array.ndim
    return np.ascontiguousarray(array[flip])[flip]


def misaligned(array):
    buffer = np.zeros(array.nbytes + 1, np.uint8)
    view = buffer[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def byte_swapped(array):
    return array.astype(array.dtype.newbyteorder()) if array.dtype.kind == "f" else array


WAYS = [np.ascontiguousarray, np.asfortranarray, every_second, backwards, misaligned, byte_swapped]


@st.composite
def calls(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=5)))
    dtype, statistics = draw(st.sampled_from(TYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    data = realistic_data(
        shape,
        dtype,
        data_format=draw(st.sampled_from(["NCX", "NXC"])),
        rng=rng,
        statistics_dtype=statistics,
        ratio=draw(st.sampled_from([0.0, 3.0])),
    )
    names = ("x", "dy", "mean", "variance", "gamma", "beta")
    arrays = dict(zip(names, (*data.backward_inputs, data.beta), strict=True))
    if draw(st.booleans()):
        arrays["residual"] = rng.standard_normal(shape).astype(dtype)
    for name, array in arrays.items():
        arrays[name] = draw(st.sampled_from(WAYS))(array)
        arrays[name].flags.writeable = False
    residual = arrays.pop("residual", None)
    return arrays, residual, random_mask(arrays["x"], rng), draw(st.booleans()), data.options


def native(array):
    """Return the array in the machine's byte order, and in the same order in memory."""
    return None if array is None else array.astype(array.dtype.newbyteorder("="), order="K")


# With nothing compiled it compiles the kernels of all types.
@pytest.mark.timeout(1200)
@settings(max_examples=150)
@given(call=calls())
def test_relu_operators_with_arbitrary_array_layouts_are_accurate(call):
    arrays, residual, mask, training, options = call
    x, dy, mean, variance, gamma, beta = arrays.values()
    added, wanted = {"residual": residual} | options, {"residual": residual is not None} | options
    result = backnorm.batch_norm_forward(x, gamma, beta, **added, activation="relu")
    y = backnorm.batch_norm_inference(x, mean, variance, gamma, beta, **added, activation="relu")
    gradients = backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, mask=mask, training=training, **wanted
    )
    assert all(a.dtype.isnative for a in (*result, y, *gradients) if a is not None)
    # x itself says in which order the bits are; a copy may lie otherwise.
    plain = [native(a) for a in (dy, mean, variance, gamma, beta)]
    dy, mean, variance, gamma, beta = plain
    x = x if x.dtype.isnative else native(x)
    added["residual"] = native(residual)
    assert_passed(check_forward(x, gamma, beta, result, activation=RELU, **added))
    operands = x, mean, variance, gamma, beta
    assert_passed(check_inference(*operands, y, activation=RELU, **added))
    verdicts = check_backward(
        x, dy, mean, variance, gamma, gradients, mask=mask, training=training, **wanted
    )
    assert_passed(verdicts)


def test_relu_operators_with_broadcast_residual_and_dy_are_accurate(rng):
    data = realistic_data((6, 5, 7, 3), FLOAT32, rng=rng)
    residual, dy = (
        np.broadcast_to(a[:1, :, :, :1], data.x.shape) for a in (data.dy * 0.5, data.dy)
    )
    added = data.options | {"residual": residual}
    result = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **added, activation="relu")
    operands = data.x, data.gamma, data.beta
    assert_passed(check_forward(*operands, result, activation=RELU, **added))
    wanted = data.options | {"mask": result.mask, "residual": True}
    inputs = (data.x, dy, data.mean, data.variance, data.gamma)
    gradients = backnorm.batch_norm_backward(*inputs, **wanted)
    assert 0 not in gradients.dresidual.strides
    assert_passed(check_backward(*inputs, gradients, **wanted))


def test_relu_operators_keep_inputs_and_return_new_arrays(rng):
    data = realistic_data((6, 5, 7, 3), FLOAT32, rng=rng)
    residual = rng.standard_normal(data.x.shape).astype(np.float32)
    mask = random_mask(data.x, rng)
    inputs = [*data.backward_inputs, data.beta, residual, mask]
    before = [array.copy() for array in inputs]
    normalized = backnorm.batch_norm_forward(
        data.x, data.gamma, data.beta, residual=residual, **data.options, activation="relu"
    )
    gradients = backnorm.batch_norm_backward(
        *data.backward_inputs, mask=mask, residual=True, **data.options
    )
    for array, copy in zip(inputs, before, strict=True):
        np.testing.assert_array_equal(array, copy)
    results = [*normalized, *gradients]
    for k, result in enumerate(results):
        assert not any(np.may_share_memory(result, array) for array in inputs)
        assert not any(np.may_share_memory(result, other) for other in results[:k])
