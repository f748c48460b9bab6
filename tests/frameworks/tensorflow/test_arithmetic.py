"""The arithmetic of elements: eagerly, in a graph, in gradients, in formulas."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import backnorm
from backnorm import tensorflow as ours
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32

from .bits import differ, same

BOTH = ("float32", "float64")
OTHER = {"float32": "float64", "float64": "float32"}
# So many elements that some of float16, too, depend on the arithmetic.
SHAPE = (12, 40, 41, 5)
TYPES = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
ARITHMETICS = pytest.mark.parametrize("arithmetic", BOTH)


@pytest.fixture
def data(rng):
    """Return a function that makes realistic data of a type, far from a mean of 0."""
    return lambda dtype: realistic_data(SHAPE, dtype, data_format="NXC", rng=rng, ratio=30.0)


def everything(x, dy, mean, variance, gamma, beta, **options):
    """Return what the three functions make of tensors."""
    operands = {"epsilon": 1e-5, **options}
    forward = ours.batch_norm(x, gamma, beta, **operands)
    y = ours.batch_norm_inference(x, mean, variance, gamma, beta, **operands)
    return *forward, y, *ours.batch_norm_backward(x, dy, mean, variance, gamma, **operands)


def arrays(data):
    return data.x, data.dy, data.mean, data.variance, data.gamma, data.beta


@ARITHMETICS
def test_traced_function_keeps_arithmetic_of_its_trace(arithmetic, data):
    tensors = list(map(tf.constant, arrays(data(FLOAT32))))
    expected, traced = everything(*tensors, arithmetic=arithmetic), tf.function(everything)
    for block in (arithmetic, OTHER[arithmetic]):
        with backnorm.arithmetic(block):
            same(traced(*tensors), expected)


@ARITHMETICS
def test_second_order_gradients_do_not_depend_on_arithmetic(arithmetic, data):
    operands = data(FLOAT32)
    inputs = list(map(tf.constant, (operands.x, operands.dy, operands.gamma)))
    channels = tf.constant(operands.mean), tf.constant(operands.variance)
    found = []
    for each in (arithmetic, None):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            x, dy, gamma = inputs
            options = {"epsilon": 1e-5, "arithmetic": each}
            results = ours.batch_norm_backward(x, dy, *channels, gamma, **options)
        found.append(
            tape.gradient(results, inputs, output_gradients=list(map(tf.sin, [dy, gamma, gamma])))
        )
    same(*found)


@pytest.mark.covering(1)
@pytest.mark.parametrize("mode", ["XLA", "forward"])
@TYPES
def test_formulas_compute_in_requested_arithmetic(mode, dtype, data):
    operands = data(dtype)
    x, dy, *channels, beta = arrays(operands)
    tensors = list(map(tf.constant, arrays(operands)))

    def in_mode(**options):
        called = partial(everything, **options)
        if mode == "XLA":
            return tf.function(called, jit_compile=True)(*tensors)
        with tf.autodiff.ForwardAccumulator(tensors[0], tensors[1]) as accumulator:
            results = called(*tensors)
        return *results, accumulator.jvp(results[0])

    wide, narrow = in_mode(), in_mode(arithmetic="float32")
    same(in_mode(arithmetic="float64"), wide)
    differ(narrow, wide)
    assert [each.dtype for each in narrow] == [each.dtype for each in wide]
    # TensorFlow's cast to 16 bits is by way of float32, outside of XLA.
    budget_of_wide = "float64" if dtype == FLOAT32 else None
    for arithmetic, found in ((budget_of_wide, wide), ("float32", narrow)):
        options = {"epsilon": 1e-5, "data_format": "NXC", "arithmetic": arithmetic}
        found = list(map(np.asarray, found))
        verdicts = [
            *check_forward(x, operands.gamma, beta, tuple(found[:3]), **options).values(),
            *check_inference(x, *channels, beta, found[3], **options).values(),
            *check_backward(x, dy, *channels, tuple(found[4:7]), **options).values(),
        ]
        assert [each.detail for each in verdicts if not each.passed] == []
