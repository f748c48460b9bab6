"""Gradients of the layer through what TensorFlow vectorises."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from backnorm import keras as ours

if keras.backend.backend() != "tensorflow":
    pytest.skip("Only TensorFlow copies operations to map them.", allow_module_level=True)

import tensorflow as tf

WAYS = {"eager": lambda function: function, "function": tf.function}


@pytest.fixture
def layer():
    layer = ours.BatchNormalization(dtype="float64")
    layer.build((None, 2))
    layer.gamma.assign([0.5, 2.0])
    return layer


def slopes(layer, x, results):
    sources = [x, layer.gamma.value, layer.beta.value]
    with tf.GradientTape() as tape:
        tape.watch(sources)
        loss = tf.reduce_sum(tf.sin(results(x)))
    return tape.gradient(loss, sources, unconnected_gradients="zero")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("training", [True, False])
def test_vectorized_map_gradients_of_layer_match_loop(layer, rng, training, way):
    x = tf.constant(rng.normal(size=(3, 4, 2)))

    def mapped(x):
        return keras.ops.vectorized_map(lambda part: layer(part, training=training), x)

    def unrolled(x):
        return tf.stack([layer(part, training=training) for part in tf.unstack(x)])

    found = WAYS[way](lambda x: slopes(layer, x, mapped))(x)
    for own, expected in zip(found, slopes(layer, x, unrolled), strict=True):
        assert np.abs(expected).max() > 1e-6
        np.testing.assert_allclose(own, expected, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_jacobian_penalty_with_pfor_match_loop(layer, rng, way):
    x = tf.constant(rng.normal(size=(4, 2)))

    def penalty(pfor):
        def over(x):
            with tf.GradientTape(persistent=not pfor) as tape:
                tape.watch(x)
                y = tf.sin(layer(x, training=True))
            return tape.batch_jacobian(y, x, experimental_use_pfor=pfor)

        return over

    found = WAYS[way](lambda x: slopes(layer, x, penalty(True)))(x)
    for own, expected in zip(found, slopes(layer, x, penalty(False)), strict=True):
        assert np.abs(expected).max() > 1e-6
        np.testing.assert_allclose(own, expected, atol=1e-10)
