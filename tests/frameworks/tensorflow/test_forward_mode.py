"""Forward mode, and second orders of every kind, beside TensorFlow's own differentiation."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from backnorm import tensorflow as ours

from .conftest import REJECTIONS

EPSILON = 1e-3
OPERATIONS = ("batch_norm", "batch_norm_inference", "batch_norm_backward", "frozen backward")


def composed(x, gamma, beta):
    mean = tf.reduce_mean(x, [0, 1])
    variance = tf.reduce_mean((x - mean) ** 2, [0, 1])
    return gamma * (x - mean) * tf.math.rsqrt(variance + EPSILON) + beta


def layer(x, gamma, beta):
    return ours.batch_norm(x, gamma, beta, epsilon=EPSILON).y


@pytest.fixture
def operands(rng):
    """Return x, gamma and beta, a tangent of each, and weights that make a scalar of y."""
    shapes = [(4, 2, 3), (3,), (3,)]
    return [tf.constant(rng.normal(0.3, 1.5, shape)) for shape in (*shapes, *shapes, shapes[0])]


def scalar(function, sources, weights):
    return tf.reduce_sum(weights * tf.sin(function(*sources)))


def forward(function, sources, tangents, weights):
    with tf.autodiff.ForwardAccumulator(sources, tangents) as accumulator:
        y = function(*sources)
    return [accumulator.jvp(y)]


def forward_over_backward(function, sources, tangents, weights):
    with tf.autodiff.ForwardAccumulator(sources, tangents) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = scalar(function, sources, weights)
        gradients = tape.gradient(loss, sources)
    return accumulator.jvp(gradients)


def backward_over_forward(function, sources, tangents, weights):
    with tf.GradientTape() as tape:
        tape.watch(sources)
        with tf.autodiff.ForwardAccumulator(sources, tangents) as accumulator:
            loss = scalar(function, sources, weights)
        slope = accumulator.jvp(loss)
    return tape.gradient(slope, sources)


def forward_over_forward(function, sources, tangents, weights):
    with tf.autodiff.ForwardAccumulator(sources, tangents) as outer:
        with tf.autodiff.ForwardAccumulator(sources, tangents) as inner:
            loss = scalar(function, sources, weights)
        slope = inner.jvp(loss)
    return [outer.jvp(slope)]


def of_the_incoming_gradient(function, sources, tangents, weights):
    """Only dy has a tangent: the backward pass meets forward mode where the forward did not."""
    with tf.autodiff.ForwardAccumulator(weights, tangents[0]) as accumulator:
        with tf.GradientTape() as tape:
            tape.watch(sources)
            loss = tf.reduce_sum(weights * function(*sources))
        gradients = tape.gradient(loss, sources)
    return accumulator.jvp(gradients)


def hessian(pfor):
    def compute(function, sources, tangents, weights):
        x = sources[0]
        with tf.GradientTape(persistent=True) as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = scalar(function, sources, weights)
            slope = inner.gradient(loss, x)
        return [outer.jacobian(slope, x, experimental_use_pfor=pfor)]

    return compute


def batch_jacobian(function, sources, tangents, weights):
    x = sources[0]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(*sources)
    return [tape.batch_jacobian(y, x)]


def graph_hessian(function, sources, tangents, weights):
    x, *rest = sources

    @tf.function
    def traced(flat):
        y = scalar(function, [tf.reshape(flat, x.shape), *rest], weights)
        return tf.hessians(y, flat)

    return traced(tf.reshape(x, [-1]))


SECOND = (forward_over_backward, forward_over_forward, backward_over_forward)
WAYS = {
    **{f.__name__: f for f in (forward, *SECOND, of_the_incoming_gradient)},
    **{f.__name__: f for f in (batch_jacobian, graph_hessian)},
    "hessian by pfor": hessian(pfor=True),
    "hessian by a loop": hessian(pfor=False),
}


@pytest.mark.long
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_and_second_order_match_composed_layer(operands, close, way, traced):
    arguments = operands[:3], operands[3:6], operands[6]

    def run(function):
        def call():
            return WAYS[way](function, *arguments)

        return tf.function(call)() if traced else call()

    close(list(run(layer)), list(run(composed)), 1e-11)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_forward_mode_through_traced_function_matches_composed_layer(operands, close, traced):
    arguments = operands[:3], operands[3:6], operands[6]

    def call():
        return forward(tf.function(layer), *arguments)

    close(tf.function(call)() if traced else call(), forward(composed, *arguments))


@pytest.mark.covering(1)
@pytest.mark.parametrize("way", [*SECOND[:2], of_the_incoming_gradient])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
def test_second_order_forward_mode_around_traced_function_raises(operands, way, traced):
    def call():
        return way(tf.function(layer), operands[:3], operands[3:6], operands[6])

    with pytest.raises(REJECTIONS, match="put the accumulator into the function"):
        tf.function(call)() if traced else call()


def operation(name, x, dy, mean, variance, gamma, beta):
    if name == "batch_norm":
        return ours.batch_norm(x, gamma, beta, epsilon=EPSILON)[:1]
    if name == "batch_norm_inference":
        return [ours.batch_norm_inference(x, mean, variance, gamma, beta, epsilon=EPSILON)]
    training = name == "batch_norm_backward"
    if training:
        # The statistics are those of x; as functions of it they are the operator's business.
        mean = tf.reduce_mean(tf.stop_gradient(x), [0, 1])
        variance = tf.reduce_mean((tf.stop_gradient(x) - mean) ** 2, [0, 1])
    return ours.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=EPSILON,
                                    training=training)  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_and_backward_mode_are_transposes(rng, name, traced):
    shapes = [(4, 2, 3)] * 2 + [(3,)] * 4
    sources = [tf.constant(rng.uniform(0.5, 2.0, shape)) for shape in shapes]
    tangents = [tf.constant(rng.normal(size=shape)) for shape in shapes]

    def call():
        with tf.autodiff.ForwardAccumulator(sources, tangents) as accumulator:
            results = operation(name, *sources)
        return [accumulator.jvp(result) for result in results]

    jvp = tf.function(call)() if traced else call()
    weights = [tf.constant(rng.normal(size=one.shape)) for one in jvp]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        results = operation(name, *sources)
    vjp = tape.gradient(results, sources, weights, unconnected_gradients="zero")
    one, other = (
        sum(float(tf.reduce_sum(a * b)) for a, b in zip(*pair, strict=True))
        for pair in ((jvp, weights), (tangents, vjp))
    )
    assert abs(other) > 1e-3
    np.testing.assert_allclose(one, other, rtol=1e-11)


@pytest.mark.covering(1)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_match_finite_differences(rng, name, traced):
    shapes = [(4, 2, 3)] * 2 + [(3,)] * 4
    sources = [rng.uniform(0.5, 2.0, shape) for shape in shapes]
    weights: list[tf.Tensor] = []

    def weighted(*operands):
        terms = (w * tf.sin(r) for r, w in zip(operation(name, *operands), weights, strict=True))
        return tf.add_n([tf.reduce_sum(term) for term in terms])

    weights += [tf.constant(rng.normal(size=r.shape)) for r in operation(name, *sources)]
    checked = tf.function(weighted) if traced else weighted
    # Of so small a step the error of the differences is some 1e-9 to 1e-8 of the largest.
    theoretical, numerical = tf.test.compute_gradient(checked, sources, delta=2.0**-16)
    assert max(np.abs(each).max() for each in theoretical) > 1e-2
    for one, other in zip(theoretical, numerical, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-7 * max(1.0, np.abs(other).max()))
