"""reduce, exchange, apply: the backward pass in its phases, over parts that add up."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import ChannelSums, reference
from backnorm.conformance.data import exact_data, realistic_data
from backnorm.conformance.judge import judge
from backnorm.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64

LAYOUTS = [("NCX", (7, 5, 6, 3)), ("NXC", (7, 6, 3, 5))]
CUTS = [(), (3,), (1, 1, 4), (0, 7), (2, 2, 2, 5)]


def parts(array, cuts):
    return np.split(array, cuts)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("cuts", CUTS)
def test_sums_of_parts_add_up_to_the_sums_of_the_whole(dtype, data_format, shape, cuts, rng):
    data = exact_data(shape, dtype, data_format=data_format, rng=rng)
    total = ChannelSums.zero(5)
    for x, dy in zip(parts(data.x, cuts), parts(data.dy, cuts), strict=True):
        total = total + backnorm.reduce(x, dy, data.mean, data_format=data_format)
    whole = backnorm.reduce(data.x, data.dy, data.mean, data_format=data_format)
    for sums in (total, whole):
        assert sums.count == data.x.size // 5
        assert sums.sum_dy.dtype == sums.sum_dy_xmu.dtype == np.float64
        np.testing.assert_array_equal(sums.sum_dy, data.dbeta)
        s = 1.0 / np.sqrt(data.variance.astype(float))
        np.testing.assert_array_equal(sums.sum_dy_xmu * s, data.dgamma)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("training", [True, False])
def test_dx_of_parts_is_the_part_of_dx(dtype, data_format, shape, training, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=3.0)
    exact = reference.backward(*data.backward_inputs, training=training, **data.options)
    cuts = (2, 2, 6)
    sums = sum(
        (
            backnorm.reduce(x, dy, data.mean, data_format=data_format)
            for x, dy in zip(parts(data.x, cuts), parts(data.dy, cuts), strict=True)
        ),
        start=ChannelSums.zero(5),
    )
    pieces = [
        backnorm.apply(
            x,
            dy,
            data.mean,
            data.variance,
            data.gamma,
            sums,
            training=training,
            **data.options,
        )
        for x, dy in zip(parts(data.x, cuts), parts(data.dy, cuts), strict=True)
    ]
    dx = np.concatenate(pieces)
    verdict = judge("dx", dx, exact.dx, exact.dx_terms, dtype)
    assert verdict.passed, verdict.detail


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32], ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
def test_reduce_then_apply_is_the_backward_pass(dtype, data_format, shape, poison, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    whole = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    sums = backnorm.reduce(data.x, data.dy, data.mean, data_format=data_format)
    out = poison(np.empty_like(data.x))
    dx = backnorm.apply(*data.backward_inputs, sums, **data.options, out=out)
    assert dx is out
    exact = reference.backward(*data.backward_inputs, **data.options)
    for actual in (dx, whole.dx):
        verdict = judge("dx", actual, exact.dx, exact.dx_terms, dtype)
        assert verdict.passed, verdict.detail
    in_place = backnorm.apply(*data.backward_inputs, sums, **data.options, out=data.dy)
    assert in_place is data.dy
    np.testing.assert_array_equal(in_place, dx)


def test_apply_uses_the_count_of_the_sums_not_of_its_own_part(rng):
    data = realistic_data((8, 3, 5), FLOAT64, rng=rng)
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    half = backnorm.apply(
        data.x[:4],
        data.dy[:4],
        *data.backward_inputs[2:],
        ChannelSums(sums.sum_dy, sums.sum_dy_xmu, 2 * sums.count),
        **data.options,
    )
    whole = backnorm.batch_norm_backward(*data.backward_inputs, **data.options).dx[:4]
    assert np.abs(half - whole).max() > 1e-3


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 3)])
def test_an_empty_part_adds_nothing_and_gets_nothing(shape, rng):
    data = realistic_data((4, 3, 5), FLOAT32, rng=rng)
    empty = np.zeros(shape, np.float32)
    none = backnorm.reduce(empty, empty, data.mean)
    assert none.count == 0
    np.testing.assert_array_equal(none.sum_dy, np.zeros(3))
    np.testing.assert_array_equal(none.sum_dy_xmu, np.zeros(3))
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    both = sums + none
    assert both.count == sums.count
    np.testing.assert_array_equal(both.sum_dy, sums.sum_dy)
    dx = backnorm.apply(empty, empty, *data.backward_inputs[2:], both, **data.options)
    assert dx.shape == shape


def test_sums_of_other_channels_are_refused(rng):
    data = realistic_data((4, 3, 5), FLOAT32, rng=rng)
    with pytest.raises(backnorm.ArgumentValueError, match="sums"):
        backnorm.apply(*data.backward_inputs, ChannelSums.zero(4), **data.options)
    with pytest.raises(backnorm.ArgumentValueError, match="channels"):
        ChannelSums.zero(3) + ChannelSums.zero(4)
    with pytest.raises(backnorm.ArgumentTypeError, match="sums"):
        backnorm.apply(*data.backward_inputs, (np.zeros(3), np.zeros(3), 1), **data.options)


@pytest.mark.parametrize(
    "count", [0, 41, -5, np.nan, np.inf, 42.0, 2.5, "42", None, 10**400], ids=str
)
def test_sums_of_another_count_are_refused(count, rng):
    data = realistic_data((7, 5, 6), FLOAT32, rng=rng)
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    assert sums.count == 42
    broken = ChannelSums(sums.sum_dy, sums.sum_dy_xmu, count)
    with pytest.raises(backnorm.ArgumentError, match=r"^sums: its count must"):
        backnorm.apply(*data.backward_inputs, broken, **data.options)


@pytest.mark.parametrize("dtype", ["i8", "?", "c16", "O", "U3", "M8[s]", "i8,i8"])
def test_sums_of_no_numbers_are_refused(dtype, rng):
    data = realistic_data((7, 5, 6), FLOAT32, rng=rng)
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    for broken in (
        ChannelSums(np.zeros(5, dtype), sums.sum_dy_xmu, sums.count),
        ChannelSums(sums.sum_dy, np.zeros(5, dtype), sums.count),
    ):
        with pytest.raises(backnorm.ArgumentTypeError, match=r"^sums: its sum_dy"):
            backnorm.apply(*data.backward_inputs, broken, **data.options)
        with pytest.raises(backnorm.ArgumentTypeError, match=r"^sums: its sum_dy"):
            _ = sums + broken
