"""Gradients through what TensorFlow vectorises (`tf.vectorized_map`, Jacobians), in float64."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from backnorm import tensorflow as ours

from .conftest import REJECTIONS

EPSILON = 1e-3
WAYS = {"eager": lambda function: function, "function": partial(tf.function, autograph=False)}
ways = pytest.mark.parametrize("way", WAYS)


def normalised(x, mean, variance, gamma, beta):
    return (x - mean) * tf.math.rsqrt(variance + EPSILON) * gamma + beta


def composed_batch_norm(x, gamma, beta):
    mean = tf.reduce_mean(x, [0])
    return normalised(x, mean, tf.reduce_mean((x - mean) ** 2, [0]), gamma, beta)


def batch_norm(x, gamma, beta, **options):
    return ours.batch_norm(x, gamma, beta, epsilon=EPSILON, **options).y


def inference(x, *rest):
    return ours.batch_norm_inference(x, *rest, epsilon=EPSILON)


def frozen_backward(x, dy, mean, variance, gamma):
    dx, dgamma, dbeta = ours.batch_norm_backward(
        x, dy, mean, variance, gamma, epsilon=EPSILON, training=False
    )
    return dx * dgamma + dbeta


def composed_frozen_backward(x, dy, mean, variance, gamma):
    s = tf.math.rsqrt(variance + EPSILON)
    return gamma * s * dy * tf.reduce_sum(dy * (x - mean) * s, 0) + tf.reduce_sum(dy, 0)


#: Of each: ours, the composed one, how many arguments are mapped and how many are not.
FUNCTIONS = {
    "batch_norm": (batch_norm, composed_batch_norm, 1, 2),
    "inference": (inference, normalised, 1, 4),
    "frozen backward": (frozen_backward, composed_frozen_backward, 2, 3),
}


@pytest.fixture
def operands(rng):
    """Return mapped tensors, (3, 4, 2), and positive ones per channel."""

    def make(mapped, channels):
        large = [tf.constant(rng.normal(size=(3, 4, 2))) for _ in range(mapped)]
        return large, [tf.constant(rng.uniform(0.5, 2.0, 2)) for _ in range(channels)]

    return make


def vectorised(function, mapped, rest):
    return tf.vectorized_map(lambda parts: function(*parts, *rest), tuple(mapped))


def unrolled(function, mapped, rest):
    return tf.stack(
        [function(*parts, *rest) for parts in zip(*map(tf.unstack, mapped), strict=True)]
    )


def slopes(function, mapped, rest, over):
    """Return the gradients of a loss of what `over` makes of a function."""
    sources = [*mapped, *rest]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = tf.reduce_sum(tf.sin(over(function, mapped, rest)))
    return tape.gradient(loss, sources, unconnected_gradients="zero")


def slope_of_each(function):
    """Return the function that has the gradient with respect to x of a loss of another's."""

    def gradient(x, *rest):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.sin(function(x, *rest)))
        return tape.gradient(loss, x)

    return gradient


def jacobian(pfor):
    def over(function, mapped, rest):
        x, *others = [each[0] for each in mapped]
        with tf.GradientTape(persistent=not pfor) as tape:
            tape.watch(x)
            y = tf.sin(function(x, *others, *rest))
        return tape.jacobian(y, x, experimental_use_pfor=pfor)

    return over


def batch_jacobian(pfor):
    def over(function, mapped, rest):
        x, *others = [each[0] for each in mapped]
        with tf.GradientTape(persistent=not pfor) as tape:
            tape.watch(x)
            y = tf.sin(function(x, *others, *rest))
        return tape.batch_jacobian(y, x, experimental_use_pfor=pfor)

    return over


@pytest.mark.covering(1)
@ways
@pytest.mark.parametrize("name", FUNCTIONS)
def test_vectorized_map_first_gradients_match_loop(operands, close, name, way):
    own, composed, *counts = FUNCTIONS[name]
    tensors = operands(*counts)
    found = WAYS[way](lambda *a: slopes(own, *a, vectorised))(*tensors)
    close(found, slopes(composed, *tensors, unrolled))


@pytest.mark.covering(1)
@ways
@pytest.mark.parametrize("name", ["batch_norm", "inference"])
def test_vectorized_map_of_gradients_has_gradients_of_loop(operands, close, name, way):
    own, composed, *counts = FUNCTIONS[name]
    tensors = operands(*counts)
    found = WAYS[way](lambda *a: slopes(slope_of_each(own), *a, vectorised))(*tensors)
    close(found, slopes(slope_of_each(composed), *tensors, unrolled))


@pytest.mark.covering(1)
@ways
@pytest.mark.parametrize("pfor", [pytest.param(True, marks=pytest.mark.long), False])
@pytest.mark.parametrize("over", [jacobian, batch_jacobian])
@pytest.mark.parametrize("name", ["batch_norm", "inference"])
def test_gradient_of_jacobian_matches_composed_function(operands, close, name, over, pfor, way):
    own, composed, *counts = FUNCTIONS[name]
    tensors = operands(*counts)
    found = WAYS[way](lambda *a: slopes(own, *a, over(pfor)))(*tensors)
    expected = slopes(composed, *tensors, over(True))
    # All but one of the mapped samples are not used.
    close([found[0][0], *found[1:]], [expected[0][0], *expected[1:]], 1e-11)
    np.testing.assert_array_equal(found[0][1:], 0)


@pytest.mark.long
def test_vectorized_map_second_gradients_match_loop(operands, close):
    def first(over):
        def gradients(function, mapped, rest):
            found = slopes(function, mapped, rest, over)
            return tf.concat([tf.reshape(each, [-1]) for each in found], 0)

        return gradients

    tensors = operands(1, 2)
    found = slopes(batch_norm, *tensors, first(vectorised))
    close(found, slopes(composed_batch_norm, *tensors, first(unrolled)))


@ways
def test_vectorized_map_of_traced_function_has_gradients_of_loop(operands, close, way):
    traced = tf.function(batch_norm)
    mapped, rest = operands(1, 2)
    traced(mapped[0][0], *rest)
    found = WAYS[way](lambda *a: slopes(traced, *a, vectorised))(mapped, rest)
    close(found, slopes(composed_batch_norm, mapped, rest, unrolled))


@pytest.mark.long
def test_nested_vectorized_map_has_gradients_of_loop(operands, close):
    mapped, rest = operands(1, 2)
    inner = [tf.stack([*mapped, tf.sin(mapped[0])])]

    def mapped_by(over):
        return lambda x, *rest: over(batch_norm, [x], rest)

    found = slopes(mapped_by(vectorised), inner, rest, vectorised)
    close(found, slopes(mapped_by(unrolled), inner, rest, unrolled))


def test_vectorized_map_in_version_1_graph_has_gradients_of_loop(operands, close):
    mapped, rest = operands(1, 2)
    arrays = [each.numpy() for each in (*mapped, *rest)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        x, *others = map(tf.constant, arrays)
        loss = tf.reduce_sum(tf.sin(vectorised(batch_norm, [x], others)))
        found = session.run(tf.gradients(loss, [x, *others]))
    close(list(map(tf.constant, found)), slopes(composed_batch_norm, mapped, rest, unrolled))


def test_reproducible_vectorized_map_matches_loop_and_rejects_second_order(operands):
    def function(*tensors):
        return batch_norm(*tensors, reproducible=True)

    tensors = operands(1, 2)
    for found, expected in zip(
        slopes(function, *tensors, vectorised), slopes(function, *tensors, unrolled), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-15)
    with pytest.raises(REJECTIONS, match="differentiable once, not twice"):
        slopes(slope_of_each(function), *tensors, vectorised)


@pytest.mark.long
def test_vectorized_map_third_order_gradients_raise(operands):
    with pytest.raises(REJECTIONS, match="no gradients of the third order"):
        slopes(slope_of_each(slope_of_each(batch_norm)), *operands(1, 2), vectorised)


def test_gradient_of_operation_copied_by_vectorized_map_raises(operands):
    # TensorFlow copies the operation as it is: no loop is around it, and its inputs are not mapped.
    (x,), rest = operands(1, 2)

    @WAYS["function"]
    def gradients():
        with tf.GradientTape() as tape:
            tape.watch(x)

            def function(part):
                with tf.control_dependencies([part + 1]):
                    constant = tf.identity(x[0])
                return part * batch_norm(constant, *rest)

            loss = tf.reduce_sum(tf.sin(tf.vectorized_map(function, x)))
        return tape.gradient(loss, x)

    with pytest.raises(
        LookupError, match=r"copied this operation without its gradient; use tf.map"
    ):
        gradients()


def test_frozen_backward_mixed_second_gradient_matches_composed_formula(operands, close):
    # The gradient to mean has dbeta in it, and so dy.
    (x, dy), (mean, *rest) = operands(2, 3)

    def of_mean(function):
        def gradient(dy, mean):
            with tf.GradientTape() as tape:
                tape.watch(mean)
                loss = tf.reduce_sum(function(dy, mean))
            return tape.gradient(loss, mean)

        return gradient

    def own(dy, mean):
        statistics = (mean, *rest)
        return ours.batch_norm_backward(
            x[0], dy, *statistics, epsilon=EPSILON, training=False
        ).dgamma

    def composed(dy, mean):
        return tf.reduce_sum(dy * (x[0] - mean) * tf.math.rsqrt(rest[0] + EPSILON), 0)

    def total(function):
        with tf.GradientTape() as tape:
            tape.watch(dy)
            loss = tf.reduce_sum(tf.sin(of_mean(function)(dy[0], mean)))
        return [tape.gradient(loss, dy)]

    close(total(own), total(composed))
    close(tf.function(total)(own), total(composed))


def test_saved_function_keeps_gradients_and_rejects_vectorized_map(operands, close, tmp_path):
    (x,), rest = operands(1, 2)
    module = tf.Module()
    module.step = tf.function(batch_norm)
    slopes(lambda x: module.step(x, *rest), [x], [], lambda f, m, _: f(m[0][0]))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))

    def over(function, mapped, rest):
        return function(mapped[0][0], *rest)

    close(slopes(loaded.step, [x], rest, over), slopes(composed_batch_norm, [x], rest, over))
    # TensorFlow saves no gradient that needs an operation's inputs: an error, with its text.
    with pytest.raises((TypeError, tf.errors.InvalidArgumentError)):
        slopes(loaded.step, [x], rest, vectorised)
