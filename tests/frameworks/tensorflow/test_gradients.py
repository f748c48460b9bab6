"""Gradients of both orders beside TensorFlow's own differentiation, in float64."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import tensorflow as tf

from backnorm import tensorflow as ours

from .conftest import REJECTIONS

EPSILON = 1e-3


def _column(values, x, axis):
    shape = [1] * x.shape.rank
    shape[axis] = -1
    return tf.reshape(values, shape)


def composed_normalised(x, mean, variance, gamma, beta, *, epsilon, axis):
    """Return y with the given statistics, by operators that TensorFlow differentiates."""
    y = (x - _column(mean, x, axis)) * tf.math.rsqrt(_column(variance, x, axis) + epsilon)
    y = y if gamma is None else y * _column(gamma, x, axis)
    return y if beta is None else y + _column(beta, x, axis)


def composed_batch_norm(x, gamma, beta, *, epsilon, axis):
    """Return y with the batch's own statistics."""
    axes = [i for i in range(x.shape.rank) if i != axis % x.shape.rank]
    # tf.nn.moments would stop the gradient of the mean: right in first order alone.
    mean = tf.reduce_mean(x, axes)
    variance = tf.reduce_mean((x - _column(mean, x, axis)) ** 2, axes)
    return composed_normalised(x, mean, variance, gamma, beta, epsilon=epsilon, axis=axis)


@pytest.fixture
def tensors(rng):
    """Return x, gamma, beta, and weights that make scalars of tensors."""

    def make(*shapes):
        return [tf.constant(rng.normal(0.3, 1.5, shape)) for shape in shapes]

    return make


def layer(axis=-1):
    def own(x, gamma, beta):
        return ours.batch_norm(x, gamma, beta, epsilon=EPSILON, axis=axis).y

    def theirs(x, gamma, beta):
        return composed_batch_norm(x, gamma, beta, epsilon=EPSILON, axis=axis)

    return own, theirs


def first_order(function, x, parameters, weights):
    sources = [x, *(p for p in parameters if p is not None)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = tf.reduce_sum(weights[0] * tf.sin(function(x, *parameters)))
    return tape.gradient(loss, sources)


def second_order(function, x, parameters, weights):
    sources = [x, *(p for p in parameters if p is not None)]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        gradients = first_order(function, x, parameters, weights)
        total = tf.add_n(
            [tf.reduce_sum(w * g * g) for w, g in zip(weights[1:], gradients, strict=False)]
        )
    return tape.gradient(total, sources)


WAYS = {
    "eager": lambda order, function: lambda *a: order(function, *a),
    "all in a function": lambda order, function: tf.function(lambda *a: order(function, *a)),
    "the layer in a function": lambda order, function: lambda *a: order(tf.function(function), *a),
}


@pytest.mark.covering(2)
@pytest.mark.parametrize("order", [first_order, second_order])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("operands", [(True, True), (False, False)], ids=["affine", "plain"])
def test_gradients_of_batch_norm_match_composed_layer(tensors, close, order, way, axis, operands):
    shape = (4, 3, 5, 6)
    channels = (shape[axis],)
    x, gamma, beta, *weights = tensors(shape, channels, channels, shape, shape, channels, channels)
    parameters = [p if there else None for p, there in zip((gamma, beta), operands, strict=True)]
    own, theirs = layer(axis)
    close(WAYS[way](order, own)(x, parameters, weights), order(theirs, x, parameters, weights))


@pytest.mark.parametrize("order", [first_order, second_order])
@pytest.mark.parametrize("way", ["eager", "all in a function"])
def test_gradients_of_inference_match_composed_layer_for_all_operands(tensors, close, order, way):
    shape = (4, 3, 6)
    x, mean, variance, gamma, beta, *weights = tensors(shape, *[6] * 4, shape, shape, *[6] * 4)
    variance = tf.abs(variance) + 0.1

    def own(*a):
        return ours.batch_norm_inference(*a, epsilon=EPSILON)

    def theirs(*a):
        return composed_normalised(*a, epsilon=EPSILON, axis=-1)

    rest = [mean, variance, gamma, beta]
    close(WAYS[way](order, own)(x, rest, weights), order(theirs, x, rest, weights), 1e-11)


def test_gradients_of_frozen_backward_match_composed_formulas(tensors, close):
    shape = (4, 3, 6)
    x, dy, mean, variance, gamma, *weights = tensors(shape, shape, 6, 6, 6, shape, 6, 6)
    variance = tf.abs(variance) + 0.1
    sources = [x, dy, mean, variance, gamma]

    def total(results):
        return tf.add_n([tf.reduce_sum(w * r) for w, r in zip(weights, results, strict=True)])

    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = total(ours.batch_norm_backward(*sources, epsilon=EPSILON, training=False))
    with tf.GradientTape() as other:
        other.watch(sources)
        s = tf.math.rsqrt(variance + EPSILON)
        h = (x - mean) * s
        expected = total([gamma * s * dy, tf.reduce_sum(dy * h, [0, 1]), tf.reduce_sum(dy, [0, 1])])
    close(tape.gradient(loss, sources), other.gradient(expected, sources))


def of_backward(operands, weights):
    """Return a function of x and dy: a scalar of `batch_norm_backward`, and its gradients."""
    mean, variance, gamma = operands

    def value_and_gradients(x, dy):
        with tf.GradientTape() as tape:
            tape.watch([x, dy])
            results = ours.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=EPSILON)
            value = tf.add_n([tf.reduce_sum(w * r) for w, r in zip(weights, results, strict=True)])
        return value, *tape.gradient(value, [x, dy])

    return value_and_gradients


@pytest.fixture
def first_and_second(tensors):
    """Return x, dy, and the function of both by `of_backward`."""
    shape = (4, 3, 6)
    x, dy, mean, variance, gamma, *weights = tensors(shape, shape, 6, 6, 6, shape, 6, 6)
    return x, dy, of_backward((mean, tf.abs(variance) + 0.1, gamma), weights)


@pytest.mark.parametrize("way", ["eager", "function", "function in a function"])
@pytest.mark.parametrize("tapes", [1, 2])
def test_second_order_under_tapes_that_watch_x_is_that_without(first_and_second, close, way, tapes):
    x, dy, function = first_and_second
    expected = function(x, dy)
    inner = function if way == "eager" else tf.function(function)
    with ExitStack() as stack:
        persistent = [True, False][:tapes]
        for tape in [stack.enter_context(tf.GradientTape(each)) for each in persistent]:
            tape.watch(x)
        found = (tf.function(inner) if way == "function in a function" else inner)(x, dy)
    close(found, expected)


@pytest.mark.parametrize("in_function", [False, True])
def test_gradient_of_value_beside_second_order_is_not_rejected(
    first_and_second, close, in_function
):
    x, dy, function = first_and_second
    called = tf.function(function) if in_function else function
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        value, of_x, _ = called(x, dy)
    for _ in range(2):
        close([tape.gradient(value, x)], [function(x, dy)[1]])
    with pytest.raises(REJECTIONS, match="no gradients of the third order"):
        tape.gradient(of_x, x)


def test_gradients_of_third_order_are_rejected(tensors):
    x, weight = tensors((4, 6), (4, 6))

    def third(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (second,) = second_order(function, x, [], [weight, weight])
            total = tf.reduce_sum(weight * second)
        return tape.gradient(total, x)

    def function(x):
        return ours.batch_norm(x, epsilon=EPSILON).y

    calls = [lambda: third(function), tf.function(lambda: third(function))]
    calls.append(lambda: third(tf.function(function)))
    for call in calls:
        with pytest.raises(REJECTIONS, match="no gradients of the third order"):
            call()


def test_returned_statistics_have_no_gradient(tensors):
    x, gamma = tensors((4, 6), 6)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, gamma])
        y, mean, variance = ours.batch_norm(x, gamma, epsilon=EPSILON)
        mixed = y * mean + variance
    assert tape.gradient(mean, x) is None
    assert tape.gradient(variance, x) is None
    plain = tape.gradient(y, x, output_gradients=tf.broadcast_to(mean, y.shape) * x)
    np.testing.assert_array_equal(tape.gradient(mixed, x, output_gradients=x), plain)


@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
def test_persistent_tape_returns_same_gradients_twice(tensors, close, wrap):
    x, gamma, beta, weight = tensors((4, 3, 6), 6, 6, (4, 3, 6))
    own, theirs = layer()
    results = []
    for function in (wrap(own), theirs):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, gamma])
            loss = tf.reduce_sum(weight * tf.sin(function(x, gamma, beta)))
        first = tape.gradient(loss, x)
        np.testing.assert_array_equal(first, tape.gradient(loss, x))
        results.append([first, tape.gradient(loss, gamma)])
    close(*results)


@pytest.mark.parametrize("pfor", [True, False])
def test_jacobian_of_batch_norm_matches_composed_layer(tensors, close, pfor):
    x, gamma, beta = tensors((3, 2, 2), 2, 2)
    results = []
    for function in layer():
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = function(x, gamma, beta)
        results.append([tape.jacobian(y, x, experimental_use_pfor=pfor)])
    close(*results)


def test_recompute_grad_gradients_match_composed_layer(tensors, close):
    x, gamma, beta, *weights = tensors((4, 3, 6), 6, 6, (4, 3, 6))
    own, theirs = layer()
    close(
        first_order(tf.recompute_grad(own), x, [gamma, beta], weights),
        first_order(theirs, x, [gamma, beta], weights),
    )


def test_vectorized_map_and_map_fn_equal_loop(tensors, close):
    (x,) = tensors((3, 4, 2, 5))
    expected = tf.stack([ours.batch_norm(part, epsilon=EPSILON).y for part in x])

    def function(part):
        return ours.batch_norm(part, epsilon=EPSILON).y

    close([tf.vectorized_map(function, x), tf.map_fn(function, x)], [expected, expected], 0)


@pytest.mark.parametrize("order", [first_order, second_order])
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
def test_gradients_from_indexed_slices_match_composed_layer(tensors, close, order, wrap):
    x, gamma, beta, *weights = tensors((4, 6), 6, 6, (2, 6), (4, 6), 6, 6)

    def gathered(function):
        # The gradient of tf.gather is a tf.IndexedSlices.
        return lambda *a: tf.gather(function(*a), [2, 0])

    own, theirs = layer()
    result = wrap(lambda: order(gathered(own), x, [gamma, beta], weights))()
    close(result, order(gathered(theirs), x, [gamma, beta], weights))
