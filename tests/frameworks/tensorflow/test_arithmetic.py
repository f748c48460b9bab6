"""What elements are computed in: eagerly, in a graph, by gradients, by formulas."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import backnorm
from backnorm import ArgumentTypeError, ArgumentValueError
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


def canonical(data, arithmetic):
    """Return the same from NumPy's functions."""
    options = {"epsilon": 1e-5, "data_format": "NXC", "arithmetic": arithmetic}
    x, dy, *channels, beta = arrays(data)
    forward = backnorm.batch_norm_forward(x, data.gamma, beta, **options)
    y = backnorm.batch_norm_inference(x, *channels, beta, **options)
    return *forward, y, *backnorm.batch_norm_backward(x, dy, *channels, **options)


@ARITHMETICS
@TYPES
def test_functions_with_arithmetic_have_bits_of_numpy_functions(run, dtype, arithmetic, data):
    operands, other = data(dtype), OTHER[arithmetic]
    expected, others = canonical(operands, arithmetic), canonical(operands, other)
    if dtype != BFLOAT16:
        differ(expected, others)
    same(run(partial(everything, arithmetic=arithmetic), *arrays(operands)), expected)
    with backnorm.arithmetic(arithmetic):
        same(run(everything, *arrays(operands)), expected)
        # A call's own argument has precedence.
        same(run(partial(everything, arithmetic=other), *arrays(operands)), others)
    same(run(everything, *arrays(operands)), canonical(operands, None))


@ARITHMETICS
def test_traced_function_keeps_arithmetic_of_its_trace(arithmetic, data):
    operands = data(FLOAT32)
    tensors, traced = list(map(tf.constant, arrays(operands))), tf.function(everything)
    for block in (arithmetic, OTHER[arithmetic]):
        with backnorm.arithmetic(block):
            same(traced(*tensors), canonical(operands, arithmetic))


@ARITHMETICS
@TYPES
def test_gradients_have_arithmetic_of_forward_call(dtype, arithmetic, data):
    operands = data(dtype)
    x, gamma, beta = map(tf.constant, (operands.x, operands.gamma, operands.beta))
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, gamma, beta])
        with backnorm.arithmetic(arithmetic):
            y, mean, variance = ours.batch_norm(x, gamma, beta, epsilon=1e-5)
            frozen = ours.batch_norm_inference(x, mean, variance, gamma, beta, epsilon=1e-5)
    backward = partial(
        backnorm.batch_norm_backward, operands.x, operands.dy, mean.numpy(), variance.numpy(),
        operands.gamma, epsilon=1e-5, data_format="NXC",
    )  # fmt: skip
    for result, training in ((y, True), (frozen, False)):
        expected = backward(training=training, arithmetic=arithmetic)
        with backnorm.arithmetic(OTHER[arithmetic]):
            found = tape.gradient(result, [x, gamma, beta], output_gradients=operands.dy)
        same(found, expected)
        if dtype == FLOAT32:
            differ(found, backward(training=training, arithmetic=OTHER[arithmetic]))


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


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_inference", "batch_norm_backward"])
def test_functions_reject_bad_arithmetic_with_message_of_core(run, name):
    counts = {"batch_norm": (1, 0), "batch_norm_inference": (1, 2), "batch_norm_backward": (2, 2)}
    large, small = counts[name]
    operands = [np.arange(12.0).reshape(4, 3)] * large + [np.arange(1.0, 4.0)] * small

    def call(**options):
        return run(partial(getattr(ours, name), epsilon=1e-3, **options), *operands)

    known = r"^arithmetic: unknown; got 'float16'; expected 'float32' or 'float64'"
    with pytest.raises(ArgumentValueError, match=known):
        call(arithmetic="float16")
    with pytest.raises(ArgumentTypeError, match=r"^arithmetic: must be a string"):
        call(arithmetic=tf.float32)
    with pytest.raises(ArgumentValueError, match=r"^arithmetic: float64 elements are computed"):
        call(arithmetic="float32")
    # A block holds for all that is called in it.
    with backnorm.arithmetic("float32"):
        call()
