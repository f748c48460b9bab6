"""Arrays dense in some order of their axes are taken as they are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from backnorm.layout import Extents, adjacent, extents_of, in_order, memory_order, restore


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_in_order_of_dense_array_returns_contiguous_view(order):
    base = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    array = base.transpose(order)
    found = memory_order(array)
    canonical = in_order(array, found, array.dtype)
    assert canonical.flags.c_contiguous
    assert np.shares_memory(canonical, base)
    np.testing.assert_array_equal(restore(canonical, found), array)


@given(st.data())
def test_extents_of_dense_array_place_channels_on_middle_axis(data):
    """Element (n, c, s) of the canonical form has channel c in the array."""
    shape = data.draw(hnp.array_shapes(min_dims=2, max_dims=5, max_side=4))
    axis = data.draw(st.integers(0, len(shape) - 1))
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    channel = np.broadcast_to(
        np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape
    )
    array = restore(np.ascontiguousarray(channel.transpose(order)), order)
    found = memory_order(array)
    extents = extents_of(shape, (axis,), found)
    flat = in_order(array, found, array.dtype).reshape(extents)
    assert (flat == np.arange(extents.channels)[None, :, None]).all()


def test_extents_of_channels_last_array_have_inner_size_one():
    array = np.zeros((2, 5, 7, 3)).transpose(0, 3, 1, 2)
    assert extents_of(array.shape, (1,), memory_order(array)) == Extents(70, 3, 1)


def test_extents_of_one_channel_merge_all_axes_into_inner():
    assert extents_of((4, 1, 6), (1,), (0, 1, 2)) == Extents(1, 1, 24)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 6))[:, ::2],
        np.zeros((4, 6))[::-1],
        np.broadcast_to(np.zeros(3), (4, 3)),
        np.zeros((4, 3), ">f8"),
    ],
    ids=["strided", "reversed", "broadcast", "byte-swapped"],
)
def test_in_order_of_non_dense_or_byte_swapped_array_returns_native_copy(array):
    canonical = in_order(array, memory_order(array), np.dtype(np.float64))
    assert canonical.flags.c_contiguous
    assert canonical.dtype.isnative
    assert not np.may_share_memory(canonical, array)


@pytest.mark.parametrize(
    ("shape", "axes", "order", "expected"),
    [
        ((2, 3, 4), (1,), (0, 1, 2), (2, 3, 4)),
        ((2, 3, 4), (1, 2), (0, 1, 2), (2, 12, 1)),
        ((2, 3, 4), (0, 1), (0, 1, 2), (1, 6, 4)),
        ((2, 3, 4), (0, 1, 2), (0, 1, 2), (1, 24, 1)),
        ((2, 3, 4), (), (0, 1, 2), (1, 1, 24)),
        ((2, 1, 4), (0, 2), (0, 1, 2), (1, 8, 1)),
        # Not side by side in this order: in another, for which arrays are copied.
        ((2, 3, 4), (0, 2), (0, 1, 2), (3, 8, 1)),
        ((2, 3, 4), (1, 2), (0, 2, 1), (2, 12, 1)),
        ((5,), (0,), (0,), (1, 5, 1)),
        ((2, 0, 4), (1,), (0, 1, 2), (2, 0, 4)),
    ],
)
def test_extents_of_any_channel_axes_are_outer_channels_inner(shape, axes, order, expected):
    assert extents_of(shape, axes, adjacent(shape, axes, order)) == expected
