"""Results blended into what the outputs hold."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import Blend, reference
from backnorm.conformance.data import realistic_data
from backnorm.dtypes import ELEMENT_TYPES, FLOAT64

SHAPES = [("NCX", (3, 5, 7, 9)), ("NXC", (40, 7, 33)), ("NCX", (2, 3, 40000)), ("NCX", (6, 4))]


def held_for(data, rng):
    like = data.mean.dtype
    return (
        rng.normal(size=data.x.shape).astype(data.x.dtype),
        rng.normal(size=data.mean.shape).astype(like),
        rng.normal(size=data.mean.shape).astype(like),
    )


def check(actual, exact, added, held, shares, dtype):
    """The blend of the exact result, rounded once; float64 has a few more roundings.

    Sums of 16 bits have float32 roundings of the terms that are `added` up.
    """
    alpha, beta = shares
    high = exact.hi.astype(np.longdouble) + exact.lo
    expected = alpha * high + beta * held.astype(np.longdouble)
    terms = np.abs(alpha * high) + np.abs(beta * held.astype(np.longdouble))
    step = np.spacing(np.abs(actual)).astype(np.longdouble)
    wide = 8 if dtype == FLOAT64 else 0
    limit = 0.51 * step + (wide + 2.0**-20) * np.finfo(np.float64).eps * terms + 2.0**-40 * terms
    if dtype.itemsize == 2:
        limit += 2.0**-21 * abs(alpha) * added
    assert (np.abs(actual.astype(np.longdouble) - expected) <= limit).all()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES[:3], ids=str)
@pytest.mark.parametrize(("data_format", "shape"), SHAPES)
def test_outputs_become_alpha_of_the_result_and_beta_of_what_they_held(
    data_format, shape, dtype, training, rng
):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)
    held = held_for(data, rng)
    blend = Blend(data=(0.5, -1.25), channels=(2.0, 0.75))
    out = tuple(array.copy() for array in held)
    found = backnorm.batch_norm_backward(
        *data.backward_inputs, training=training, out=out, blend=blend, **data.options
    )
    exact = reference.backward(*data.backward_inputs, training=training, **data.options)
    for name, array, before, shares in zip(
        ("dx", "dgamma", "dbeta"), out, held, (blend.data, *[blend.channels] * 2), strict=True
    ):
        assert getattr(found, name) is array
        added = getattr(exact, f"{name}_terms")
        check(array, getattr(exact, name), added, before, shares, data.x.dtype)


def test_beta_zero_does_not_read_what_is_held(rng):
    data = realistic_data((4, 3, 5), np.dtype(np.float32), data_format="NCX", rng=rng)
    out = tuple(np.full_like(array, np.nan) for array in held_for(data, rng))
    found = backnorm.batch_norm_backward(
        *data.backward_inputs, out=out, blend=Blend(), **data.options
    )
    plain = backnorm.batch_norm_backward(*data.backward_inputs, **data.options)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one, other)


def test_in_place_and_in_any_order_of_axes(rng):
    data = realistic_data((4, 3, 5, 6), np.dtype(np.float32), data_format="NCX", rng=rng)
    x, dy, *channels = data.backward_inputs
    blend = Blend(data=(1.0, 1.0))
    expected = dy.copy()
    backnorm.batch_norm_backward(
        x, dy, *channels, out=(expected, None, None), blend=blend, **data.options
    )
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (3, 1, 0, 2)):
        back = np.argsort(order)
        turned = [a.transpose(order).copy().transpose(back) for a in (x, dy)]
        found = backnorm.batch_norm_backward(
            *turned, *channels, out=(turned[1], None, None), blend=blend, **data.options
        )
        assert found.dx is turned[1]
        np.testing.assert_array_equal(found.dx, expected)


@pytest.mark.parametrize(
    ("out", "match"),
    [
        (None, "out: must be what is blended into"),
        ((None, None), "out: must be what is blended into"),
        ((None, None, None), "out: holds no dx"),
        ((np.zeros((4, 3, 5), np.float32), None, None), "out: holds no dgamma"),
        ((np.zeros((4, 3, 4), np.float32), np.zeros(3, "f"), np.zeros(3, "f")), "shape"),
        ((np.zeros((4, 3, 5), np.float32), np.zeros(4, "f"), np.zeros(3, "f")), "shape"),
        ((np.zeros((4, 3, 5), np.float32), np.zeros(3), np.zeros(3, "f")), "element type"),
        ((np.zeros((4, 3, 5), np.float32), [0.0] * 3, np.zeros(3, "f")), "must be an array"),
    ],
    ids=str,
)
def test_what_cannot_be_blended_into_is_refused(out, match, rng):
    data = realistic_data((4, 3, 5), np.dtype(np.float32), data_format="NCX", rng=rng)
    blend = Blend(data=(1.0, 1.0), channels=(1.0, 1.0))
    with pytest.raises(backnorm.ArgumentError, match=match):
        backnorm.batch_norm_backward(*data.backward_inputs, out=out, blend=blend, **data.options)


def test_overlaps_and_bad_variances_are_refused(rng):
    data = realistic_data((4, 3, 5), np.dtype(np.float32), data_format="NCX", rng=rng)
    x, dy, mean, variance, gamma = data.backward_inputs
    same = np.zeros(3, np.float32)
    for out in ((None, same, same), (None, mean, None), (x, None, None)):
        with pytest.raises(backnorm.ArgumentValueError, match="overlap"):
            backnorm.batch_norm_backward(
                x, dy, mean, variance, gamma, out=out, blend=Blend(), **data.options
            )
    with pytest.raises(backnorm.ArgumentValueError, match="variance"):
        backnorm.batch_norm_backward(
            x, dy, mean, -variance, gamma, out=(None,) * 3, blend=Blend(), **data.options
        )
