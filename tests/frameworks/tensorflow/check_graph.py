"""Within a tf.function: shapes, control flow, datasets, pruning, XLA."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from backnorm import BacknormError
from backnorm import tensorflow as ours
from backnorm.tensorflow import calls, differentiable
from backnorm.tensorflow.checks import refuse_xla

EPSILON = 1e-3


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


@pytest.mark.parametrize("axis", [-1, 1])
def test_static_shapes_are_known_where_they_can_be(axis):
    shape = (None, 8, 6, 5) if axis == -1 else (None, 5, 8, 6)
    found = {}

    @tf.function(input_signature=[spec(*shape), spec(5), spec(None)])
    def step(x, gamma, beta):
        with tf.GradientTape() as tape:
            tape.watch([x, gamma])
            y, mean, variance = ours.batch_norm(x, gamma, beta, epsilon=EPSILON, axis=axis)
        dx, dgamma = tape.gradient(y, [x, gamma], output_gradients=y * y)
        again = ours.batch_norm_inference(x, mean, variance, gamma, epsilon=EPSILON, axis=axis)
        found["large"] = [t.shape.as_list() for t in (y, dx, again)]
        found["small"] = [t.shape.as_list() for t in (mean, variance, dgamma)]
        return dx

    concrete = (3, *shape[1:])
    assert step(tf.random.normal(concrete), tf.ones(5), tf.zeros(5)).shape == concrete
    assert found == {"large": [list(shape)] * 3, "small": [[5]] * 3}


def test_one_trace_serves_all_batch_sizes(rng):
    traces = []

    @tf.function(input_signature=[spec(None, 3, 4)])
    def normalise(x):
        traces.append(1)
        return ours.batch_norm(x, epsilon=EPSILON)

    for batch in (2, 7, 1, 0):
        x = rng.normal(size=(batch, 3, 4)).astype("f")
        for one, other in zip(normalise(x), ours.batch_norm(x, epsilon=EPSILON), strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(traces) == 1


def test_results_nobody_needs_are_not_computed(monkeypatch):
    called = []
    original = calls.backward
    monkeypatch.setattr(
        differentiable.calls, "backward", lambda *a: called.append(1) or original(*a)
    )

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = ours.batch_norm(x, epsilon=EPSILON).y
        tape.gradient(y, x, output_gradients=y)
        return y

    x = tf.random.normal((4, 3))
    step(x)
    assert not called


def test_control_flow(rng):
    x = tf.constant(rng.normal(size=(4, 3)))

    @tf.function
    def repeated(x, times):
        for _ in tf.range(times):
            if tf.reduce_sum(x) > -1e9:
                x = ours.batch_norm(x * x, epsilon=EPSILON).y
        return x

    expected = x
    for _ in range(3):
        expected = ours.batch_norm(expected * expected, epsilon=EPSILON).y
    np.testing.assert_allclose(repeated(x, tf.constant(3)), expected, rtol=1e-12)


def test_parallel_calls_of_a_dataset(rng):
    x = rng.normal(size=(12, 4, 3)).astype("f")

    def normalise(part):
        return ours.batch_norm(part, epsilon=EPSILON).y

    data = tf.data.Dataset.from_tensor_slices(x).map(normalise, num_parallel_calls=4)
    for part, result in zip(x, data, strict=True):
        np.testing.assert_array_equal(result, normalise(part))


def test_functions_that_run_eagerly():
    x = tf.random.normal((4, 3))
    expected = tf.function(lambda x: ours.batch_norm(x, epsilon=EPSILON).y)(x)
    tf.config.run_functions_eagerly(True)
    try:
        result = tf.function(lambda x: ours.batch_norm(x, epsilon=EPSILON).y)(x)
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_array_equal(result, expected)


def jitted(x):
    return tf.function(lambda x: ours.batch_norm(x, epsilon=EPSILON).y, jit_compile=True)(x)


def nested(x):
    @tf.function
    def inner(x):
        return ours.batch_norm(x, epsilon=EPSILON).y

    return tf.function(lambda x: inner(x) + 1, jit_compile=True)(x)


def conditional(x):
    @tf.function(jit_compile=True)
    def function(x):
        return tf.cond(
            tf.reduce_sum(x) > 0, lambda: x, lambda: ours.batch_norm(x, epsilon=EPSILON).y
        )

    return function(x)


@pytest.mark.parametrize("call", [jitted, nested, conditional])
def test_xla_is_refused_while_tracing(call):
    with pytest.raises(BacknormError, match=r"batch_norm: XLA cannot compile it.*jit_compile"):
        call(tf.random.normal((4, 3)))


def test_where_tensorflow_cannot_be_asked_its_own_error_names_the_operator(monkeypatch):
    monkeypatch.setattr(differentiable, "refuse_xla", lambda _: None)
    with pytest.raises(tf.errors.InvalidArgumentError, match="backnorm_batch_norm_not_for_XLA"):
        jitted(tf.random.normal((4, 3)))


def test_that_tensorflow_cannot_be_asked_is_no_error(monkeypatch):
    from tensorflow.python.ops import control_flow_util

    monkeypatch.delattr(control_flow_util, "GraphOrParentsInXlaContext")
    refuse_xla("batch_norm")
