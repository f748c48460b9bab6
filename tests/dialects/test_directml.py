"""DirectML: any set of axes may be reduced."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.judge import judge
from backnorm.dialects import directml

OPERATORS = {
    True: directml.BATCH_NORMALIZATION_TRAINING_GRAD,
    False: directml.BATCH_NORMALIZATION_GRAD,
}
EPSILON = 1e-3
F32_EPSILON = float(np.float32(EPSILON))
NAMES = ("Input", "InputGradient", "Mean", "Variance", "Scale")
SHAPES = [(7,), (5, 3), (4, 3, 5), (2, 3, 4, 5), (2, 3, 2, 3, 2)]
SETS = [
    (shape, axes)
    for shape in SHAPES
    for size in range(len(shape) + 1)
    for axes in itertools.combinations(range(len(shape)), size)
    # Of rank 5, the sets of two axes.
    if len(shape) < 5 or size == 2
]


pytestmark = pytest.mark.parametrize("training", OPERATORS)


def inputs_of(shape, axes, dtype=np.float32, seed=0):
    """Return inputs whose statistics keep `axes`."""
    rng = np.random.default_rng(seed)
    reduced = tuple(axis for axis in range(len(shape)) if axis not in axes)
    x = (rng.normal(size=shape) * 3 + 1).astype(dtype)
    wide = x.astype(float)
    mean, variance = wide.mean(reduced, keepdims=True), wide.var(reduced, keepdims=True)
    if not reduced:
        variance = variance + 1.0
    scale = rng.normal(size=mean.shape)
    values = (x, rng.normal(size=shape), mean, variance, scale)
    return dict(zip(NAMES, (v.astype(dtype) for v in values), strict=True))


def call(operands, training, **changes):
    return OPERATORS[training](*(operands | {"Epsilon": EPSILON} | changes).values())


def flat(array, axes):
    """Return an array with its kept axes merged into the second of two."""
    others = [axis for axis in range(array.ndim) if axis not in axes]
    count = math.prod(array.shape[axis] for axis in others)
    return np.ascontiguousarray(array.transpose([*others, *axes])).reshape(count, -1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("shape", "axes"), SETS)
def test_backward_over_each_set_of_axes_is_within_budget(shape, axes, dtype, training):
    operands = inputs_of(shape, axes, dtype)
    out = call(operands, training)
    assert [o.shape for o in out] == [shape, operands["Mean"].shape, operands["Mean"].shape]
    assert {str(o.dtype) for o in out} == {dtype}
    x, dy = (flat(operands[name], axes) for name in NAMES[:2])
    channels = [operands[name].reshape(-1) for name in NAMES[2:]]
    exact = reference.backward(x, dy, *channels, epsilon=F32_EPSILON, training=training)
    actual = (flat(out[0], axes), out[1].reshape(-1), out[2].reshape(-1))
    for name, array in zip(("dx", "dgamma", "dbeta"), actual, strict=True):
        terms = getattr(exact, f"{name}_terms")
        verdict = judge(name, array, getattr(exact, name), terms, x.dtype)
        assert verdict.passed, verdict.detail


@pytest.mark.parametrize("axes", [(1,), (1, 2), (0, 3), (2, 3), (0, 2)])
@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0), (1, 0, 3, 2)])
def test_backward_of_permuted_memory_equals_contiguous(axes, order, training):
    operands = inputs_of((2, 3, 4, 5), axes)
    expected = call(operands, training)
    back = np.argsort(order)
    moved = {
        name: np.ascontiguousarray(operands[name].transpose(order)).transpose(back)
        for name in NAMES
    }
    for actual, known in zip(call(moved, training), expected, strict=True):
        np.testing.assert_array_equal(actual, known)


def test_backward_with_axis_of_size_one_equals_squeezed(training):
    operands = inputs_of((4, 1, 3), (2,))
    dx, dgamma, _ = call(operands, training)
    assert dgamma.shape == (1, 1, 3)
    squeezed = {name: array.reshape(-1, 3) for name, array in operands.items()}
    np.testing.assert_array_equal(dx[:, 0], call(squeezed, training)[0])


def test_backward_with_broadcast_statistics_keeps_their_axes(training):
    operands = inputs_of((4, 3, 5), (1, 2))
    for name in NAMES[2:]:
        operands[name] = np.broadcast_to(operands[name][:, :, :1], (1, 3, 5))
    dx, dgamma, _ = call(operands, training)
    assert dgamma.shape == (1, 3, 5)
    contiguous = {name: array.copy() for name, array in operands.items()}
    np.testing.assert_array_equal(dx, call(contiguous, training)[0])
