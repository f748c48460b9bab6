"""A ReLU's mask says the order of its bits, so x may lie otherwise in the backward pass."""

from __future__ import annotations

import io
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backnorm
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward
from backnorm.layout import MARK_BYTES, order_mark
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32

SHAPE = (3, 5, 4, 2)


def laid_out(array, order):
    """Return the array dense in this order of axes."""
    return np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))


def every_second(array):
    wide = np.zeros([2 * size for size in array.shape], array.dtype)
    view = wide[(slice(None, None, 2),) * array.ndim]
    view[...] = array
    return view


def saved_and_loaded(array):
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(array))
    file.seek(0)
    return np.load(file).view(array.dtype)  # bfloat16 comes back as opaque bytes


def assert_passed(verdicts):
    assert [f"{k}: {v.detail}" for k, v in verdicts.items() if not v.passed] == []


def assert_right(forward_x, backward_x, dy, data, **options):
    """Run forward and backward on x in two layouts, and judge by x as the mask was made of it."""
    residual = np.ascontiguousarray(dy[..., ::-1])
    mask = backnorm.batch_norm_forward(
        forward_x, data.gamma, data.beta, residual=residual, activation="relu", **data.options
    ).mask
    wanted = data.options | {"mask": mask, "residual": True, **options}
    found = backnorm.batch_norm_backward(
        backward_x, dy, data.mean, data.variance, data.gamma, **wanted
    )
    wanted.pop("reproducible", None)
    inputs = forward_x, dy, data.mean, data.variance, data.gamma
    assert_passed(check_backward(*inputs, found, **wanted))
    return found


@pytest.mark.parametrize("options", [{}, {"training": False}, {"reproducible": True}], ids=str)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_backward_with_x_in_other_order_than_mask_is_accurate(dtype, options, rng):
    data = realistic_data(SHAPE, dtype, rng=rng)
    turned = laid_out(data.x, (0, 2, 3, 1)), np.asfortranarray(data.x)
    ways = np.ascontiguousarray, np.asfortranarray, every_second, saved_and_loaded
    for x, way in itertools.product((data.x, *turned), ways):
        for dy in (data.dy, way(data.dy)):
            found = assert_right(x, way(x), dy, data, **options)
            if way is not every_second:
                assert found.dx.strides == way(x).strides


@st.composite
def layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=6)))
    axes = st.permutations(range(len(shape)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    data = realistic_data(
        shape, FLOAT32, rng=rng, data_format=draw(st.sampled_from(["NCX", "NXC"]))
    )
    arrays = []
    for array in (data.x, data.x, data.dy):
        turned = laid_out(array, draw(axes))
        arrays.append(every_second(turned) if draw(st.integers(0, 3)) == 0 else turned)
    return arrays, data, draw(st.booleans())


@settings(max_examples=60)
@given(layouts())
def test_backward_with_mask_of_arbitrary_order_of_x_is_accurate(call):
    (forward_x, backward_x, dy), data, training = call
    assert_right(forward_x, backward_x, dy, data, training=training)


@pytest.mark.parametrize("reproducible", [False, True])
def test_reduce_and_apply_with_x_in_other_order_than_mask_are_accurate(reproducible, rng):
    data = realistic_data(SHAPE, FLOAT32, rng=rng)
    first = np.asfortranarray(data.x)
    moments = backnorm.reduce_forward(first, reproducible=reproducible)
    mask = backnorm.apply_forward(
        first, moments, data.gamma, data.beta, activation="relu", epsilon=data.epsilon
    ).mask
    sums = backnorm.reduce(data.x, data.dy, data.mean, mask=mask, reproducible=reproducible)
    operands = data.dy, data.mean, data.variance, data.gamma
    dx, dresidual = backnorm.apply(
        data.x, *operands, sums, mask=mask, residual=True, epsilon=data.epsilon
    )
    wanted = {"mask": mask, "residual": True, "epsilon": data.epsilon}
    whole = backnorm.batch_norm_backward(first, *operands, reproducible=reproducible, **wanted)
    found = dx, *whole[1:3], dresidual
    assert_passed(check_backward(first, *operands, found, **wanted))


def test_cached_backward_reads_each_mask_in_its_own_order(rng):
    """The masks have the same size; the first has the order of x and is read in place."""
    data = realistic_data(SHAPE, FLOAT32, rng=rng)
    for _ in range(2):
        for x in (data.x, np.asfortranarray(data.x), laid_out(data.x, (0, 2, 3, 1))):
            assert_right(x, data.x, data.dy, data)


@pytest.mark.parametrize("place", ["in place", "new"])
def test_out_with_x_in_other_order_than_mask_receives_accurate_dx(place, rng):
    data = realistic_data(SHAPE, FLOAT32, rng=rng)
    turned = np.asfortranarray(data.x)
    mask = backnorm.batch_norm_forward(turned, activation="relu", epsilon=data.epsilon).mask
    dy = data.dy.copy()
    out = dy if place == "in place" else np.empty_like(dy)
    found = backnorm.batch_norm_backward(
        data.x, dy, data.mean, data.variance, epsilon=data.epsilon, mask=mask, out=out
    )
    assert found.dx is out
    inputs = turned, data.dy, data.mean, data.variance, None
    assert_passed(check_backward(*inputs, found, mask=mask, epsilon=data.epsilon))


def test_dresidual_with_separated_channel_axes_equals_masked_dy(rng):
    """The forward pass copies x into an order of its own, which is the order of the mask's bits."""
    x, dy = rng.standard_normal((2, *SHAPE)).astype(np.float32)
    call_options = {"epsilon": 1e-3, "data_format": (0, 2)}
    y, mean, variance, mask = backnorm.batch_norm_forward(x, activation="relu", **call_options)
    for way in (np.ascontiguousarray, np.asfortranarray):
        found = backnorm.batch_norm_backward(
            way(x), dy, mean, variance, mask=mask, residual=True, **call_options
        )
        np.testing.assert_array_equal(found.dresidual, np.where(y > 0, dy, np.float32(0)))


def test_order_mark_distinguishes_orders_and_ignores_axes_of_size_one():
    orders = list(itertools.permutations(range(4)))
    marks = {order_mark(SHAPE, order) for order in orders}
    assert len(marks) == len(orders)
    assert order_mark(SHAPE, (0, 1, 2, 3)) == bytes(MARK_BYTES)
    single = (3, 1, 5, 1)
    assert {order_mark(single, order) for order in orders} == {
        bytes(MARK_BYTES),
        bytes([*bytes(7), 1]),
    }
    assert order_mark(single, (1, 0, 3, 2)) == bytes(MARK_BYTES)


def test_relu_mask_of_transposed_x_is_stored_for_20_axes_and_rejected_for_21():
    for axes in (20, 21):
        x = np.zeros((2,) * axes, np.float16)
        call_options = {"epsilon": 1.0, "activation": "relu"}
        assert (
            backnorm.batch_norm_forward(x, **call_options).mask[-MARK_BYTES:].tolist()
            == [0] * MARK_BYTES
        )
        if axes == 20:
            assert backnorm.batch_norm_forward(x.T, **call_options).mask[-MARK_BYTES:].any()
            continue
        with pytest.raises(backnorm.ArgumentValueError, match=r"^x: has too many axes.*at most 20"):
            backnorm.batch_norm_forward(x.T, **call_options)
        # Inference makes no mask.
        assert (
            backnorm.batch_norm_inference(x.T, *np.ones((2, 2), np.float16), **call_options).shape
            == x.shape
        )


@pytest.mark.parametrize("mark", [[0] * 7 + [24], [255] * 8, [1] + [0] * 7], ids=str)
def test_mask_with_invalid_order_mark_is_rejected(mark, rng):
    data = realistic_data(SHAPE, FLOAT32, rng=rng)
    mask = backnorm.batch_norm_forward(data.x, activation="relu", epsilon=data.epsilon).mask
    mask[-MARK_BYTES:] = mark
    for _ in range(2):
        with pytest.raises(backnorm.ArgumentValueError, match=r"^mask: .*store no valid order"):
            backnorm.batch_norm_backward(*data.backward_inputs, mask=mask, **data.options)
        with pytest.raises(backnorm.ArgumentValueError, match=r"^mask: .*store no valid order"):
            backnorm.reduce(data.x, data.dy, data.mean, mask=mask)
