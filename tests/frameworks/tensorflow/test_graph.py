"""Within a tf.function: shapes, control flow, datasets, pruning, XLA."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from backnorm import ArgumentValueError
from backnorm import tensorflow as ours
from backnorm.conformance.data import exact_data, realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from backnorm.tensorflow import calls, differentiable, nodes
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32

EPSILON = 1e-3


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


@pytest.mark.parametrize("axis", [-1, 1])
def test_traced_results_have_static_shapes(axis):
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


def test_function_with_unknown_batch_size_is_traced_once(rng):
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


def test_traced_function_does_not_compute_unused_gradients(monkeypatch):
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


def test_batch_norm_in_traced_control_flow_matches_eager_loop(rng):
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


def test_batch_norm_in_parallel_dataset_map_equals_eager_call(rng):
    x = rng.normal(size=(12, 4, 3)).astype("f")

    def normalise(part):
        return ours.batch_norm(part, epsilon=EPSILON).y

    data = tf.data.Dataset.from_tensor_slices(x).map(normalise, num_parallel_calls=4)
    for part, result in zip(x, data, strict=True):
        np.testing.assert_array_equal(result, normalise(part))


def test_function_that_runs_eagerly_equals_traced_function():
    x = tf.random.normal((4, 3))
    expected = tf.function(lambda x: ours.batch_norm(x, epsilon=EPSILON).y)(x)
    tf.config.run_functions_eagerly(True)
    try:
        result = tf.function(lambda x: ours.batch_norm(x, epsilon=EPSILON).y)(x)
    finally:
        tf.config.run_functions_eagerly(False)
    np.testing.assert_array_equal(result, expected)


def jitted(function):
    return tf.function(function, jit_compile=True)


def nested(function):
    # Traced before, where XLA is not: that trace is no use to XLA.
    inner = tf.function(function)
    inner(*SMALL)
    return tf.function(lambda *a: inner(*a), jit_compile=True)


def conditional(function):
    @tf.function(jit_compile=True)
    def compiled(x, *rest):
        return tf.cond(
            tf.reduce_sum(x) < np.inf, lambda: function(x, *rest), lambda: function(-x, *rest)
        )

    return compiled


SMALL = [tf.random.normal(shape) for shape in ((4, 3), (4, 3), (3,), (3,))]


def step(x, dy, gamma, beta, *, axis=-1, epsilon=EPSILON):
    """Return all that the functions return, and the gradients of a tape."""
    sources = [x, gamma, beta]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        y, mean, variance = ours.batch_norm(x, gamma, beta, epsilon=epsilon, axis=axis)
    of_tape = tape.gradient(y, sources, output_gradients=dy)
    operands = x, dy, mean, variance, gamma
    frozen = ours.batch_norm_inference(x, mean, variance, gamma, beta, epsilon=epsilon, axis=axis)
    gradients = [
        ours.batch_norm_backward(*operands, epsilon=epsilon, axis=axis, training=training)
        for training in (True, False)
    ]
    return (y, mean, variance), of_tape, frozen, *gradients


@pytest.mark.long
@pytest.mark.parametrize(
    ("way", "dtype", "axis", "data_format"),
    [
        *((jitted, dtype, -1, "NXC") for dtype in ELEMENT_TYPES),
        (jitted, FLOAT32, 1, "NCX"),
        (nested, FLOAT32, -1, "NXC"),
        (conditional, FLOAT32, -1, "NXC"),
    ],
)
def test_xla_results_pass_checks_of_judge(rng, way, dtype, axis, data_format):
    shape = (5, 4, 3, 7) if axis == -1 else (5, 7, 4, 3)
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng)

    def function(*operands):
        return step(
            *operands, axis=axis if operands[0].shape.rank > 2 else -1, epsilon=data.epsilon
        )

    results = way(function)(*map(tf.constant, (data.x, data.dy, data.gamma, data.beta)))
    forward, _, frozen, *gradients = tf.nest.map_structure(np.asarray, results)
    _, mean, variance = forward
    verdicts = [check_forward(data.x, data.gamma, data.beta, forward, **data.options)]
    operands = data.x, mean, variance, data.gamma, data.beta
    verdicts.append(check_inference(*operands, frozen, **data.options))
    operands = data.x, data.dy, mean, variance, data.gamma
    for found, training in zip(gradients, (True, False), strict=True):
        verdicts.append(check_backward(*operands, found, training=training, **data.options))
    # The tape goes back through statistics that were not rounded: exact ones need no rounding.
    shape = (8, 4, 4, 7) if axis == -1 else (8, 7, 4, 4)
    data = exact_data(shape, dtype, data_format=data_format, rng=rng)
    _, of_tape, *_ = way(function)(*map(tf.constant, (data.x, data.dy, data.gamma, data.beta)))
    found = tuple(map(np.asarray, of_tape))
    verdicts.append(check_backward(*data.backward_inputs, found, **data.options))
    assert [v.detail for each in verdicts for v in each.values() if not v.passed] == []


def test_xla_without_parameters_matches_eager_also_for_empty_batch():
    for x in (SMALL[0], tf.zeros((0, 3))):
        compiled = jitted(lambda x: ours.batch_norm(x, epsilon=EPSILON))(x)
        for one, other in zip(compiled, ours.batch_norm(x, epsilon=EPSILON), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
            assert one.dtype == other.dtype


def test_xla_without_mode_detection_raises_error_naming_operator(monkeypatch):
    monkeypatch.setattr(nodes, "control_flow_util", None)
    monkeypatch.setattr(nodes, "forwardprop_util", None)
    assert not nodes.wants_formulas(*SMALL)
    with pytest.raises(tf.errors.InvalidArgumentError, match="backnorm_batch_norm_not_for_XLA"):
        jitted(step)(*SMALL)


@pytest.mark.parametrize("axis", [-1, 1, -3])
def test_function_of_unknown_rank_equals_eager_in_one_trace(rng, axis):
    unknown = tf.TensorSpec(None, tf.float64)
    traced = tf.function(lambda *a: step(*a, axis=axis), input_signature=[unknown] * 4)
    # One trace serves all ranks that have the axis.
    for shape in ((4, 3, 5), (2, 3, 5, 6), (6, 3, 3, 3)):
        channels = (shape[axis],)
        operands = [tf.constant(rng.normal(size=s)) for s in (shape, shape, channels, channels)]
        found, expected = traced(*operands), step(*operands, axis=axis)
        for one, other in zip(*map(tf.nest.flatten, (found, expected)), strict=True):
            np.testing.assert_array_equal(one, other)
    assert traced.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    ("shape", "axis", "message"),
    [
        ((4, 3), 2, "axis: is not an axis of x, which has rank 2"),
        ((3,), -1, "x: must have rank 2 or more"),
        ((4, 5), -1, r"gamma: must hold one value per channel of x"),
    ],
)
def test_function_of_unknown_rank_raises_errors_when_it_runs(shape, axis, message):
    unknown = tf.TensorSpec(None, tf.float32)

    @tf.function(input_signature=[unknown, tf.TensorSpec([3])])
    def normalise(x, gamma):
        return ours.batch_norm(x, gamma, epsilon=EPSILON, axis=axis)

    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        normalise(tf.ones(shape), tf.ones(3))


def test_backward_with_unknown_rank_of_x_takes_rank_of_dy(rng):
    """The rank of dy is that of x, so a wrong shape raises while the function is traced."""

    @tf.function(input_signature=[tf.TensorSpec(None), spec(None, 3, None), *[spec(4)] * 3])
    def backward(x, dy, mean, variance, gamma):
        return ours.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=EPSILON, axis=1)

    with pytest.raises(ArgumentValueError, match=r"mean: .*got shape \(4,\).*\(3,\)"):
        backward.get_concrete_function()


@pytest.mark.parametrize("way", ["XLA", "forward mode"])
def test_formulas_with_unknown_rank_raise(way):
    @tf.function(input_signature=[tf.TensorSpec(None)], jit_compile=way == "XLA")
    def normalise(x):
        if way == "XLA":
            return ours.batch_norm(x, epsilon=EPSILON)
        with tf.autodiff.ForwardAccumulator(x, x):
            return ours.batch_norm(x, epsilon=EPSILON)

    with pytest.raises(ArgumentValueError, match=r"x: must have a known rank.*tf.ensure_shape"):
        normalise(tf.ones((4, 3)))
