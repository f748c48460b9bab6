"""Channels on any set of axes."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm

SHAPE = (3, 4, 5, 6)


ORDERS = [(0, 1, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0), (0, 2, 1, 3)]
AXES = [(0,), (1,), (2,), (3,), (0, 1), (1, 2), (0, 2), (1, 3), (0, 3), (1, 2, 3), (0, 1, 2, 3)]


def turned(array, axes):
    """Return rows of channels."""
    others = tuple(axis for axis in range(4) if axis not in axes)
    flat = np.ascontiguousarray(array.transpose(*others, *axes))
    return flat.reshape(-1, int(np.prod([SHAPE[axis] for axis in axes])))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axes", AXES)
def test_forward_and_backward_with_channel_axes_match_transposed_array(axes, order, rng):
    back = np.argsort(order)
    x, dy, residual = (
        rng.normal(size=SHAPE).astype("f").transpose(order).copy().transpose(back) for _ in range(3)
    )
    channels = turned(x, axes).shape[1]
    gamma, beta = rng.uniform(0.5, 1.5, (2, channels)).astype("f")
    options = {"epsilon": 1e-3, "activation": "relu"}
    forward = backnorm.batch_norm_forward(
        x, gamma, beta, residual=residual, data_format=axes, **options
    )
    plain = backnorm.batch_norm_forward(
        turned(x, axes), gamma, beta, residual=turned(residual, axes), **options
    )
    assert forward.y.shape == SHAPE
    np.testing.assert_allclose(turned(forward.y, axes), plain.y, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(forward.mean, plain.mean, rtol=1e-6, atol=1e-7)
    inputs = forward.mean, forward.variance, gamma
    gradients = backnorm.batch_norm_backward(x, dy, *inputs, epsilon=1e-3, data_format=axes)
    expected = backnorm.batch_norm_backward(
        turned(x, axes), turned(dy, axes), *inputs, epsilon=1e-3
    )
    np.testing.assert_allclose(turned(gradients.dx, axes), expected.dx, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradients.dgamma, expected.dgamma, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradients.dbeta, expected.dbeta, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("axes", AXES)
def test_double_backward_with_channel_axes_matches_transposed_array(axes, order, training, rng):
    back = np.argsort(order)
    x, dy, ddx = (rng.normal(size=SHAPE).transpose(order).copy().transpose(back) for _ in range(3))
    flat = [turned(array, axes) for array in (x, dy, ddx)]
    mean, variance, gamma, ddgamma, ddbeta = rng.uniform(0.5, 1.5, (5, flat[0].shape[1]))
    inputs = mean, variance, gamma
    options = {"ddgamma": ddgamma, "ddbeta": ddbeta, "epsilon": 1e-3, "training": training}
    found = backnorm.batch_norm_double_backward(
        x, dy, *inputs, ddx=ddx, data_format=axes, **options
    )
    expected = backnorm.batch_norm_double_backward(*flat[:2], *inputs, ddx=flat[2], **options)
    for array, other in zip(found[:2], expected[:2], strict=True):
        assert array.shape == SHAPE
        np.testing.assert_allclose(turned(array, axes), other, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.gamma, expected.gamma, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("axes", [(4,), (-1,), (1, 0), (1, 1), (1.0,), (True,), ("1",), (None,)])
def test_data_format_rejects_non_axes(axes, rng):
    x = rng.normal(size=SHAPE)
    for _ in range(2):
        with pytest.raises(backnorm.ArgumentValueError, match=r"^data_format: "):
            backnorm.batch_norm_forward(x, epsilon=1e-5, data_format=axes)
