"""Any NumPy array is a legal argument, however its elements lie in memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import backnorm
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, statistics_types


def contiguous(array):
    return array


def fortran(array):
    return np.asfortranarray(array)


def reversed_axes(array):
    flip = (slice(None, None, -1),) * array.ndim
    return np.ascontiguousarray(array[flip])[flip]


def every_second(array):
    wide = np.zeros([2 * n + 1 for n in array.shape], array.dtype)
    view = wide[tuple(slice(1, 2 * n + 1, 2) for n in array.shape)]
    view[...] = array
    return view


def byte_swapped(array):
    return array.astype(array.dtype.newbyteorder())


def misaligned(array):
    buffer = np.zeros(array.nbytes + 1, np.uint8)
    view = buffer[1:].view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


def channels_moved(array):
    if array.ndim == 1:
        return array
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def read_only(array):
    view = array.view()
    view.flags.writeable = False
    return view


WAYS = [
    contiguous,
    fortran,
    reversed_axes,
    every_second,
    byte_swapped,
    misaligned,
    channels_moved,
    read_only,
]
# ml_dtypes' bfloat16 knows no other byte order.
NARROW_WAYS = [way for way in WAYS if way is not byte_swapped]


@st.composite
def calls(draw):
    dtype = draw(st.sampled_from(ELEMENT_TYPES))
    data_format = draw(st.sampled_from(["NCX", "NXC"]))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=5)))
    data = realistic_data(
        shape,
        dtype,
        data_format=data_format,
        rng=np.random.default_rng(draw(st.integers(0, 2**32))),
        statistics_dtype=draw(st.sampled_from(statistics_types(dtype))),
        ratio=draw(st.sampled_from([0.0, 3.0])),
    )
    ways = WAYS if dtype.kind == "f" else NARROW_WAYS
    arrays = []
    for array in data.backward_inputs:
        own = ways if array.dtype.kind == "f" else NARROW_WAYS
        way = draw(st.sampled_from(own))
        arrays.append(read_only(way(array)))
    return arrays, data.options, draw(st.booleans()), draw(st.booleans())


@settings(max_examples=150)
@given(call=calls())
def test_backward_of_arbitrary_array_layouts_is_accurate(call):
    (x, dy, mean, variance, gamma), options, training, scaled = call
    arguments = (x, dy, mean, variance, gamma if scaled else None)
    gradients = backnorm.batch_norm_backward(*arguments, training=training, **options)
    assert gradients.dx.dtype.isnative
    plain = [None if a is None else a.astype(a.dtype.newbyteorder("=")) for a in arguments]
    verdicts = check_backward(*plain, gradients, training=training, **options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


@settings(max_examples=80)
@given(call=calls())
def test_forward_of_arbitrary_array_layouts_is_accurate(call):
    (x, _, beta, _, gamma), options, _, _ = call
    normalized = backnorm.batch_norm_forward(x, gamma, beta, **options)
    plain = [a.astype(a.dtype.newbyteorder("=")) for a in (x, gamma, beta)]
    verdicts = check_forward(*plain, normalized, **options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (3,), (1,), (0, 1, 2, 3)])
@pytest.mark.parametrize("which", ["x", "dy"])
def test_backward_of_broadcast_x_or_dy_is_accurate_and_returns_full_dx(
    data_format, axes, which, rng
):
    data = realistic_data((4, 6, 5, 3), FLOAT32, data_format=data_format, rng=rng)
    arrays = {"x": data.x, "dy": data.dy}
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(4))
    arrays[which] = np.broadcast_to(arrays[which][first], data.x.shape)
    assert 0 in arrays[which].strides
    inputs = (arrays["x"], arrays["dy"], data.mean, data.variance, data.gamma)
    gradients = backnorm.batch_norm_backward(*inputs, **data.options)
    assert 0 not in gradients.dx.strides
    verdicts = check_backward(*inputs, gradients, **data.options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


def test_backward_of_broadcast_channel_arrays_is_accurate(rng):
    data = realistic_data((4, 6, 5), FLOAT32, rng=rng)
    shared = [np.broadcast_to(a[:1], a.shape) for a in (data.mean, data.variance, data.gamma)]
    gradients = backnorm.batch_norm_backward(data.x, data.dy, *shared, **data.options)
    verdicts = check_backward(data.x, data.dy, *shared, gradients, **data.options)
    assert [v.detail for v in verdicts.values() if not v.passed] == []


def test_backward_does_not_change_inputs(rng):
    data = realistic_data((4, 6, 5), FLOAT32, rng=rng)
    before = [array.copy() for array in data.backward_inputs]
    backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    for array, copy in zip(data.backward_inputs, before, strict=True):
        np.testing.assert_array_equal(array, copy)
