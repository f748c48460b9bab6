"""Layers of Keras, right ones and wrong ones, of :mod:`.layer_steps`."""

from __future__ import annotations

import keras

from tests.conformance import layer_steps


class Layer(keras.Layer):
    def build(self, shape):
        own = {"initializer": "ones", "shape": shape[-1:]}
        self.gamma, self.beta = (self.add_weight(name=name, **own) for name in ("gamma", "beta"))
        self.moving_mean, self.moving_variance = (
            self.add_weight(name=name, trainable=False, **own)
            for name in ("moving_mean", "moving_variance")
        )

    def call(self, x, training=False):
        own = self.gamma, self.beta, self.moving_mean, self.moving_variance
        y, mean, variance = self.normalized(keras.ops, x, own, training)
        if training:
            self.moving_mean.assign(mean)
            self.moving_variance.assign(variance)
        return y


class OfChannels(keras.layers.BatchNormalization):
    """A right layer with channels on axis 1 and without gamma."""

    def __init__(self):
        super().__init__(axis=1, scale=False)


# Whose types are fixed.
instance = keras.layers.BatchNormalization(dtype="float32")

globals().update(layer_steps.classes("", Layer))
