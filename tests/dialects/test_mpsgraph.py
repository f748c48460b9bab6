"""MPSGraph: three functions, over any set of axes."""

from __future__ import annotations

import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.judge import judge
from backnorm.dialects.mpsgraph import (
    normalizationBetaGradient,
    normalizationGammaGradient,
    normalizationGradient,
)

from .parts import EPSILON, check_input_gradient, inputs_of

F32_EPSILON = float(np.float32(EPSILON))
TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
SHAPES = [(7,), (5, 3), (4, 3, 5), (2, 3, 4, 5)]
SETS = [
    (shape, axes)
    for shape in SHAPES
    for size in range(len(shape) + 1)
    for axes in itertools.combinations(range(len(shape)), size)
]
INPUTS = (
    "incomingGradientTensor", "sourceTensor", "meanTensor", "varianceTensor", "gammaTensor",
    "gammaGradientTensor", "betaGradientTensor",
)  # fmt: skip
FUNCTIONS = {
    normalizationBetaGradient: (*INPUTS[:2], "reductionAxes", "name"),
    normalizationGammaGradient: (*INPUTS[:4], "reductionAxes", "epsilon", "name"),
    normalizationGradient: (*INPUTS, "reductionAxes", "epsilon", "name"),
}


def arguments(operands, axes):
    values = (
        operands["dy"],
        operands["x"],
        operands["mean"],
        operands["variance"],
        operands["gamma"],
    )
    named = dict(zip(INPUTS, (*values, operands["mean"], operands["gamma"]), strict=True))
    return named | {"reductionAxes": axes, "epsilon": EPSILON, "name": None}


def call(function, named, **changes):
    return function(**{n: named[n] for n in FUNCTIONS[function]} | changes)


def sums_of(operands, axes):
    named = arguments(operands, axes)
    functions = (normalizationGammaGradient, normalizationBetaGradient)
    return [call(function, named) for function in functions]


def exact_of(operands, axes, training=True):
    """Return exact gradients of the data with the axes that are not reduced merged into one."""
    kept = [axis for axis in range(operands["x"].ndim) if axis not in axes]
    count = math.prod(operands["x"].shape[axis] for axis in axes)
    x, dy = (operands[n].transpose([*axes, *kept]).reshape(count, -1) for n in ("x", "dy"))
    channels = (operands[name].reshape(-1) for name in ("mean", "variance", "gamma"))
    return reference.backward(x, dy, *channels, epsilon=F32_EPSILON, training=training), kept


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "axes"), SETS)
def test_gradients_over_each_set_of_axes_are_within_budget(shape, axes, dtype):
    operands = inputs_of(shape, [axis for axis in range(len(shape)) if axis not in axes], dtype)
    sums = sums_of(operands, axes)
    exact, kept = exact_of(operands, axes)
    for name, array in zip(("dgamma", "dbeta"), sums, strict=True):
        assert (array.dtype, array.shape) == (operands["x"].dtype, operands["mean"].shape)
        terms = getattr(exact, f"{name}_terms")
        verdict = judge(name, array.reshape(-1), getattr(exact, name), terms, operands["x"].dtype)
        assert verdict.passed, verdict.detail
    named = arguments(operands, axes) | dict(zip(INPUTS[5:], sums, strict=True))
    dx = call(normalizationGradient, named)
    assert (dx.dtype, dx.shape) == (operands["x"].dtype, shape)
    check_input_gradient(dx, operands, *sums, EPSILON)
    # Gradients that are not given are not rounded.
    whole = call(normalizationGradient, named, gammaGradientTensor=None, betaGradientTensor=None)
    flat = whole.transpose([*axes, *kept]).reshape(exact.dx.shape)
    verdict = judge("dx", flat, exact.dx, exact.dx_terms, operands["x"].dtype)
    assert verdict.passed, verdict.detail


def test_normalization_gradient_computes_absent_parameter_gradient():
    operands = inputs_of((4, 3, 5, 2), (1,), np.float32)
    sums = sums_of(operands, (0, 2, 3))
    named = arguments(operands, (0, 2, 3)) | dict(zip(INPUTS[5:], sums, strict=True))
    both = call(normalizationGradient, named)
    for name in INPUTS[5:]:
        np.testing.assert_allclose(
            call(normalizationGradient, named, **{name: None}), both, rtol=0, atol=1e-6
        )
        # A given gradient is used.
        other = call(normalizationGradient, named, **{name: named[name] + 1})
        assert np.abs(other - both).max() > 1e-3


def test_normalization_gradient_without_gamma_equals_gamma_of_ones():
    operands = inputs_of((4, 3, 5, 2), (1,), np.float32)
    named = arguments(operands, (0, 2, 3))
    np.testing.assert_array_equal(
        call(normalizationGradient, named, gammaTensor=None),
        call(normalizationGradient, named, gammaTensor=np.ones_like(operands["gamma"])),
    )


@pytest.mark.parametrize("axes", [[2, 0, 3], np.array([0, 2, 3]), (np.int64(3), 2, 0)])
def test_reduction_axes_of_other_order_or_type_give_same_values(axes):
    operands = inputs_of((4, 3, 5, 2), (1,), np.float32)
    for function in FUNCTIONS:
        np.testing.assert_array_equal(
            call(function, arguments(operands, axes)),
            call(function, arguments(operands, (0, 2, 3))),
        )


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (3, 2, 1, 0)])
def test_functions_with_other_strides_return_same_values(order):
    operands = inputs_of((4, 3, 5, 2), (1,), np.float32)
    back = np.argsort(order)
    moved = {
        n: np.ascontiguousarray(a.transpose(order)).transpose(back) for n, a in operands.items()
    }
    flipped = {n: a[::-1].copy()[::-1] for n, a in operands.items()}
    for function in FUNCTIONS:
        expected = call(function, arguments(operands, (0, 2, 3)))
        for other in (moved, flipped):
            np.testing.assert_array_equal(call(function, arguments(other, (0, 2, 3))), expected)


def test_arithmetic_of_float32_data_defaults_to_float64():
    operands = inputs_of((64, 3, 5, 2), (1,), np.float32)
    for function in FUNCTIONS:
        named = arguments(operands, (0, 2, 3))
        wide = call(function, named, arithmetic="float64")
        np.testing.assert_array_equal(wide, call(function, named))
        np.testing.assert_allclose(
            call(function, named, arithmetic="float32"), wide, rtol=1e-5, atol=1e-5
        )
        with pytest.raises(ValueError, match=r"^arithmetic: "):
            call(function, named, arithmetic="half")


def test_functions_of_empty_batch_return_zeros_or_empty_dx():
    x, ones = np.zeros((0, 3, 4), "f"), np.ones((1, 3, 1), "f")
    operands = {"x": x, "dy": x, "mean": ones, "variance": ones, "gamma": ones}
    for array in sums_of(operands, (0, 2)):
        np.testing.assert_array_equal(array, np.zeros((1, 3, 1), "f"), strict=True)
    assert call(normalizationGradient, arguments(operands, (0, 2))).shape == (0, 3, 4)
