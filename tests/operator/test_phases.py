"""reduce, exchange, apply: both passes in their phases, over parts that add up."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import ChannelMoments, ChannelSums, reference
from backnorm.conformance.data import exact_data, realistic_data
from backnorm.conformance.judge import judge
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64

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
def test_apply_on_parts_returns_accurate_parts_of_dx(dtype, data_format, shape, training, rng):
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
def test_reduce_then_apply_returns_accurate_dx_in_out_and_in_place(
    dtype, data_format, shape, poison, rng
):
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


def test_apply_divides_sums_by_their_count(rng):
    data = realistic_data((8, 3, 5), FLOAT64, rng=rng)
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    count = 2 * sums.count
    part = data.x[:4], data.dy[:4], *data.backward_inputs[2:]
    doubled = ChannelSums(sums.sum_dy, sums.sum_dy_xmu, count)
    dx = backnorm.apply(*part, doubled, **data.options)
    x, dy, mean, variance, gamma = (a if a.ndim > 1 else a[:, None] for a in part)
    s = 1 / np.sqrt(variance + data.epsilon)
    offset, slope = sums.sum_dy[:, None] / count, s**2 * sums.sum_dy_xmu[:, None] / count
    expected = gamma * s * (dy - offset - (x - mean) * slope)
    np.testing.assert_allclose(dx, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (0, 3)])
def test_reduce_of_empty_part_adds_zero_and_apply_returns_empty_dx(shape, rng):
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


def test_sums_with_wrong_channels_or_type_are_rejected(rng):
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
def test_sums_with_invalid_count_are_rejected(count, rng):
    data = realistic_data((7, 5, 6), FLOAT32, rng=rng)
    sums = backnorm.reduce(data.x, data.dy, data.mean)
    assert sums.count == 42
    broken = ChannelSums(sums.sum_dy, sums.sum_dy_xmu, count)
    with pytest.raises(backnorm.ArgumentError, match=r"^sums: its count must"):
        backnorm.apply(*data.backward_inputs, broken, **data.options)


@pytest.mark.parametrize("dtype", ["i8", "?", "c16", "O", "U3", "M8[s]", "i8,i8"])
def test_sums_with_non_float_elements_are_rejected(dtype, rng):
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


@pytest.mark.parametrize(
    ("dtype", "offset"),
    # x of 16 bits loses its deviation beside an offset.
    [*((dtype, 0.0) for dtype in ELEMENT_TYPES), (FLOAT32, 1e4), (FLOAT64, 1e4), (FLOAT64, -1e7)],
    ids=str,
)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("cuts", CUTS)
def test_moments_of_parts_add_up_to_those_of_the_whole(
    dtype, data_format, shape, cuts, offset, rng
):
    x = (rng.normal(size=shape) + offset).astype(dtype)
    total = ChannelMoments.zero(5)
    for part in parts(x, cuts):
        total = total + backnorm.reduce_forward(part, data_format=data_format)
    wide = np.moveaxis(x.astype(np.longdouble), 1 if data_format == "NCX" else -1, 0)
    wide = wide.reshape(5, -1)
    mean, variance = wide.mean(1), wide.var(1)
    for moments in (total, backnorm.reduce_forward(x, data_format=data_format)):
        assert moments.count == wide.shape[1]
        assert moments.mean.dtype == moments.variance.dtype == np.float64
        # Relative to the deviation, and of means to what float64 has of them.
        deviation = np.sqrt(variance)
        allowed = 1e-14 * deviation + 4e-16 * np.abs(mean)
        assert (np.abs(moments.mean - mean) <= allowed).all()
        assert (np.abs(moments.variance / variance - 1) <= 1e-13 + 4 * allowed / deviation).all()


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize(("data_format", "shape"), LAYOUTS)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_forward_in_parts_matches_whole_within_rounding(dtype, data_format, shape, activation, rng):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=3.0)
    options = {**data.options, "activation": activation, "arithmetic": "float64"}
    residual = rng.normal(size=shape).astype(dtype) if activation else None
    beta = data.gamma[::-1].copy()
    whole = backnorm.batch_norm_forward(data.x, data.gamma, beta, residual=residual, **options)
    cuts = (2, 2, 6)
    moments = sum(
        (backnorm.reduce_forward(x, data_format=data_format) for x in parts(data.x, cuts)),
        start=ChannelMoments.zero(5),
    )
    others = [None] * 4 if residual is None else parts(residual, cuts)
    found = [
        backnorm.apply_forward(x, moments, data.gamma, beta, residual=other, **options)
        for x, other in zip(parts(data.x, cuts), others, strict=True)
    ]
    y = np.concatenate([each.y for each in found])
    apart = y.astype(np.float64) - whole.y.astype(np.float64)
    if dtype == FLOAT64:
        assert np.abs(apart).max() <= 8 * np.spacing(np.abs(whole.y).max())
    else:
        # Rounding errors of the mean decide elements that are nearly halfway between two values.
        assert (apart != 0).mean() < 0.01
        assert np.abs(apart).max() <= np.spacing(np.abs(whole.y).max())
    for each in found:
        np.testing.assert_array_max_ulp(each.mean, whole.mean, 4)
        np.testing.assert_array_max_ulp(each.variance, whole.variance, 4)
    if activation:
        for each in found:
            positive = np.unpackbits(each.mask, count=each.y.size, bitorder="little")
            np.testing.assert_array_equal(positive.reshape(each.y.shape), each.y > 0)


def test_backward_in_parts_after_relu_matches_whole(rng, same):
    data = realistic_data((7, 5, 6, 3), FLOAT32, rng=rng, ratio=3.0)
    options = {**data.options, "arithmetic": "float64"}
    _, mean, variance, mask = backnorm.batch_norm_forward(
        data.x, data.gamma, activation="relu", **options
    )
    operands = data.x, data.dy, mean, variance, data.gamma
    whole = backnorm.batch_norm_backward(*operands, mask=mask, residual=True, **options)
    sums = ChannelSums.zero(5)
    pieces = []
    for x, dy in zip(parts(data.x, (3,)), parts(data.dy, (3,)), strict=True):
        moments = ChannelMoments(mean.astype("d"), variance.astype("d"), 126)
        bits = backnorm.apply_forward(x, moments, data.gamma, activation="relu", **options).mask
        sums = sums + backnorm.reduce(x, dy, mean, mask=bits, arithmetic="float64")
        pieces.append((x, dy, bits))
    found = [
        backnorm.apply(x, dy, *operands[2:], sums, mask=bits, residual=True, **options)
        for x, dy, bits in pieces
    ]
    for k, expected in enumerate((whole.dx, whole.dresidual)):
        together = np.concatenate([each[k] for each in found])
        np.testing.assert_allclose(together, expected, rtol=3e-7, atol=1e-9)
    (x, dy, bits), *_ = pieces
    dx = backnorm.apply(x, dy, *operands[2:], sums, mask=bits, **options)
    same((dx,), (found[0][0],))


def test_moments_of_empty_part_do_not_change_total(same):
    some = backnorm.reduce_forward(np.arange(12.0).reshape(2, 3, 2))
    none = backnorm.reduce_forward(np.empty((0, 3, 2)))
    assert none.count == 0
    for both in (some + none, none + some, ChannelMoments.zero(3) + some):
        assert both.count == 4
        same((both.mean, both.variance), (some.mean, some.variance))
    y = backnorm.apply_forward(np.empty((0, 3, 2)), some, epsilon=1e-5)
    assert y.y.shape == (0, 3, 2)
    same((y.mean, y.variance), (some.mean, some.variance))


def test_moments_with_wrong_type_channels_count_or_variance_are_rejected(rng):
    x = rng.normal(size=(4, 3, 5))
    some = backnorm.reduce_forward(x)
    with pytest.raises(backnorm.ArgumentTypeError, match="moments"):
        backnorm.apply_forward(x, ChannelSums.zero(3), epsilon=1e-5)
    with pytest.raises(backnorm.ArgumentValueError, match=r"^moments: its per-channel"):
        backnorm.apply_forward(x, backnorm.reduce_forward(x[:, :2]), epsilon=1e-5)
    with pytest.raises(backnorm.ArgumentValueError, match=r"^moments: its count"):
        backnorm.apply_forward(x, backnorm.reduce_forward(x[:2]), epsilon=1e-5)
    with pytest.raises(TypeError):
        some + ChannelSums.zero(3)
    with pytest.raises(backnorm.ArgumentValueError, match=r"^moments: variance \+ epsilon"):
        backnorm.apply_forward(x, ChannelMoments(some.mean, -some.variance, 20), epsilon=1e-5)
