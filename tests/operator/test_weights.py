"""Weights of elements, which PyTorch's tests of masks test with PyTorch's functions."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import reference
from backnorm.activations import RELU
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward
from tests.support.dtypes import ELEMENT_TYPES

SHAPES = {"NCX": (9, 3, 5, 4), "NXC": (9, 5, 4, 3)}


def weights_for(shape, axes, kind, rng):
    """Return weights of which about a third is 0."""
    positions = [1 if axis in axes else size for axis, size in enumerate(shape)]
    counts = rng.random(positions) < 0.7
    return counts if kind == "boolean" else (counts * rng.random(positions) * 3).astype("f")


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", ["boolean", "weights"])
@pytest.mark.parametrize("data_format", SHAPES)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.covering(1)
def test_step_with_weights_is_within_budget_of_weighted_formula(
    dtype, data_format, kind, relu, rng
):
    shape = SHAPES[data_format]
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=3.0)
    weights = weights_for(shape, [shape.index(3)], kind, rng)
    ours = {**data.options, "weights": weights, "arithmetic": "float64"}
    exactly = ours | {"weights": weights.astype(float)}
    added = {"residual": rng.normal(size=shape).astype(dtype)} if relu else {}
    activation = {"activation": "relu"} if relu else {}
    forward = backnorm.batch_norm_forward(
        data.x, data.gamma, data.beta, **ours, **added, **activation
    )
    mask = {"mask": forward.mask} if relu else {}
    inputs = data.x, data.dy, forward.mean, forward.variance, data.gamma
    dx, dgamma, dbeta, *dresidual = backnorm.batch_norm_backward(
        *inputs, **ours, **mask, residual=relu
    )
    followed = {"activation": RELU} if relu else {}
    operands = data.x, data.gamma, data.beta, forward
    grades = check_forward(*operands, **exactly, **added, **followed)
    grades |= check_backward(*inputs, (dx, dgamma, dbeta), **exactly, **mask)
    assert all(grade.at_least("float64") for grade in grades.values()), grades
    for each in dresidual:
        np.testing.assert_array_equal(each, reference.masked(data.dy, forward.mask, data.x))


@pytest.mark.parametrize("axes", [(1,), (1, 3)])
def test_boolean_weights_have_bits_of_compacted_batch_with_nan_elsewhere(axes, rng):
    x, dy = (each.T for each in rng.normal(size=(2, 3, 6, 5, 4)).astype("f"))
    weights = weights_for(x.shape, axes, "boolean", rng)
    dy = np.where(weights, dy, np.float32(0))
    options = {"epsilon": 1e-3, "reproducible": True}

    def compact(array):
        ends = tuple(range(-len(axes), 0))
        counts = np.moveaxis(weights, axes, ends)[(..., *[0] * len(axes))]
        return np.moveaxis(array, axes, ends)[counts]

    padded = np.where(weights, x, np.float32(np.nan))
    masked = {"data_format": axes, "weights": weights}
    found = backnorm.batch_norm_forward(padded, **options, **masked)
    compacted = {"data_format": tuple(range(1, len(axes) + 1))}
    expected = backnorm.batch_norm_forward(compact(x), **options, **compacted)
    np.testing.assert_array_equal(compact(found.y), expected.y)
    assert np.isnan(found.y[np.broadcast_to(~weights, x.shape)]).all()
    np.testing.assert_array_equal(found.mean, expected.mean)
    np.testing.assert_array_equal(found.variance, expected.variance)
    gradients = backnorm.batch_norm_backward(x, dy, *found[1:], **options, **masked)
    dx, *_ = backnorm.batch_norm_backward(
        compact(x), compact(dy), *found[1:], **options, **compacted
    )
    np.testing.assert_array_equal(compact(gradients.dx), dx)
    frozen = {"epsilon": 1e-3, "data_format": axes, "training": False}
    plain = backnorm.batch_norm_backward(x, dy, *found[1:], **frozen)
    assert gradients.dx.strides == plain.dx.strides
    evaluated = backnorm.batch_norm_backward(x, dy, *found[1:], **frozen, weights=weights)
    np.testing.assert_array_equal(evaluated.dx, plain.dx)


def test_weights_of_size_one_serve_all_positions_and_an_output_and_an_empty_batch(rng):
    x = rng.normal(size=(4, 3, 5)).astype("f")
    weights = np.array([1, 0, 2, 0.5]).reshape(4, 1, 1)
    expected = backnorm.batch_norm_forward(
        x, epsilon=1e-3, weights=np.broadcast_to(weights, (4, 1, 5))
    )
    out = x.copy()
    found = backnorm.batch_norm_forward(out, epsilon=1e-3, weights=weights, out=out)
    assert found.y is out
    for each, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(each, other)
    empty = backnorm.batch_norm_forward(x[:0], epsilon=1e-3, weights=weights[:0])
    assert not empty.mean.any()
    statistics = np.zeros(3, "f"), np.ones(3, "f")
    gradients = backnorm.batch_norm_backward(
        x[:0], x[:0], *statistics, epsilon=1e-3, weights=weights[:0]
    )
    assert [each.shape for each in gradients] == [(0, 3, 5), (3,), (3,)]


REFUSED = {
    "none counted": ({"weights": np.zeros((4, 1, 5), bool)}, "at least one element"),
    "a negative weight": ({"weights": np.full((4, 1, 5), -1.0)}, "no negative weight"),
    "NaN": ({"weights": np.full((4, 1, 5), np.nan)}, "no NaN"),
    "channels": ({"weights": np.ones((4, 3, 5))}, "expected shape .4, 1, 5., or 1 in place"),
    "another rank": ({"weights": np.ones((4, 5))}, "expected shape .4, 1, 5., or 1 in place"),
    "integers": ({"weights": np.ones((4, 1, 5), int)}, "got int64; expected bool"),
    "no array": ({"weights": "all"}, "weights: "),
    "reproducible": (
        {"weights": np.ones((4, 1, 5)), "reproducible": True}, "without reproducible=True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_weights_raise_error_that_names_them(case, rng):
    options, message = REFUSED[case]
    x, statistics = rng.normal(size=(4, 3, 5)), np.ones(3)
    for function, operands in (
        (backnorm.batch_norm_forward, [x]),
        (backnorm.batch_norm_backward, [x, x, statistics, statistics]),
    ):
        with pytest.raises(backnorm.ArgumentError, match=message) as caught:
            function(*operands, epsilon=1e-3, **options)
        assert caught.value.argument == "weights"


def test_backward_with_weights_and_an_output_raises_error_naming_the_output(rng):
    x, statistics = rng.normal(size=(4, 3, 5)), np.ones(3)
    with pytest.raises(backnorm.ArgumentValueError, match="out: is not accepted with weights"):
        backnorm.batch_norm_backward(
            x, x, statistics, statistics, epsilon=1e-3, weights=np.ones((4, 1, 1)), out=x
        )
