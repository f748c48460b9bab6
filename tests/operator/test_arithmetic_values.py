"""Results in an arithmetic that is asked for: within its budget; in float64, rounded correctly."""

from __future__ import annotations

import numpy as np
import pytest

import backnorm
from backnorm import reference
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import (
    check_backward,
    check_forward,
    check_inference,
    ulp_error,
)
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32

pytestmark = pytest.mark.long

ARITHMETICS = ("float32", "float64")
NARROW = pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
BY_NAME = pytest.mark.parametrize("arithmetic", ARITHMETICS)
# Segments and columns, with and without a rest, of few and many elements a channel.
SHAPES = [(3, 5, 7), (2, 3, 65), (8, 6, 9, 9), (33, 70), (4, 3, 57, 57), (300, 4), (2, 40, 3)]


def assert_passed(*groups):
    details = [v.detail for verdicts in groups for v in verdicts.values() if not v.passed]
    assert details == []


@BY_NAME
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_operations_in_given_arithmetic_keep_budgets_and_apply_equals_backward(
    arithmetic, dtype, ratio, data_format, shape, rng
):
    if data_format == "NXC":
        shape = (shape[0], *shape[2:], shape[1])
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=ratio)
    options = {**data.options, "arithmetic": arithmetic}
    operands, channels = data.backward_inputs, (data.mean, data.variance, data.gamma, data.beta)
    for training in (True, False):
        gradients = backnorm.batch_norm_backward(*operands, training=training, **options)
        assert_passed(check_backward(*operands, gradients, training=training, **options))
    normalized = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **options)
    y = backnorm.batch_norm_inference(data.x, *channels, **options)
    assert_passed(
        check_forward(data.x, data.gamma, data.beta, normalized, **options),
        check_inference(data.x, *channels, y, **options),
    )
    in_parts = {"data_format": data_format, "arithmetic": arithmetic}
    sums = backnorm.reduce(data.x, data.dy, data.mean, **in_parts)
    whole = backnorm.batch_norm_backward(*operands, **options).dx
    np.testing.assert_array_equal(backnorm.apply(*operands, sums, **options), whole)


def _of_16_bits(dtype, rng):
    # Many elements a channel, and none whose gradient is exactly between two neighbours.
    return realistic_data((16, 6, 23, 11), dtype, rng=rng, ratio=3.0)


@NARROW
def test_results_of_16_bit_x_in_float64_arithmetic_are_correctly_rounded(dtype, rng):
    data = _of_16_bits(dtype, rng)
    options = {**data.options, "arithmetic": "float64"}
    exact = reference.backward(*data.backward_inputs, **data.options)
    found = backnorm.batch_norm_backward(*data.backward_inputs, **options)
    for name in ("dx", "dgamma", "dbeta"):
        output = getattr(found, name)
        assert ulp_error(output, getattr(exact, name), output.dtype).max() <= 0.5
    normalized = reference.forward(data.x, data.gamma, data.beta, **data.options)
    y, mean, _ = backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **options)
    assert ulp_error(y, normalized.y, dtype).max() <= 0.5
    assert ulp_error(mean, normalized.mean, FLOAT32).max() <= 0.5


def _turned(data, order):
    """Return x and dy with their axes in another order in memory, and the same shape."""
    back = np.argsort(order)
    return (np.ascontiguousarray(a.transpose(order)).transpose(back) for a in (data.x, data.dy))


def _in_every_layout(data, arithmetic):
    """Yield the gradients of the same elements as they lie in several ways."""
    for order in ((0, 1, 2, 3), (0, 2, 3, 1), (1, 0, 2, 3), (3, 2, 0, 1)):
        operands = *_turned(data, order), *data.backward_inputs[2:]
        yield backnorm.batch_norm_backward(*operands, **data.options, arithmetic=arithmetic)


@NARROW
def test_backward_of_16_bit_x_has_layout_independent_bits_only_in_float64(dtype, rng, engine):
    data = realistic_data((16, 64, 23, 11), dtype, rng=rng, ratio=3.0)
    first, *others = _in_every_layout(data, "float64")
    for other in others:
        for one, another in zip(first, other, strict=True):
            assert one.tobytes() == another.tobytes()
    # Which short runs are float32 follows from the layout, and shows in sums of float32. The engine
    # of NumPy computes in float64.
    first, *others = _in_every_layout(data, "float32")
    differ = any(first.dgamma.tobytes() != other.dgamma.tobytes() for other in others)
    assert differ == (engine == "kernels")


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16], ids=str)
def test_backward_in_two_arithmetics_returns_different_bits_only_with_kernels(dtype, rng, engine):
    data = realistic_data((8, 40, 12, 12), dtype, rng=rng)
    one, other = (
        backnorm.batch_norm_backward(*data.backward_inputs, **data.options, arithmetic=name)
        for name in ARITHMETICS
    )
    differ = any(a.tobytes() != b.tobytes() for a, b in zip(one, other, strict=True))
    assert differ == (engine == "kernels")
