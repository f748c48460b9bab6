"""Keras's layer, with the training step computed by backnorm."""

from __future__ import annotations

from typing import Any

import keras

from backnorm.keras.backends import COMPILED_BY_XLA, batch_norm

__all__ = ["BatchNormalization"]

_NUMBERS = ("float", "bfloat", "int", "uint", "bool")


class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, its training step computed by backnorm.

    Arguments, weights, configuration, moving statistics and results are those of Keras's layer; the
    weights of one are those of the other. What is computed here is the forward and the backward
    pass of a training step (``training=True``, and the layer trainable): to one rounding, in one
    pass over the input each, and of an input of float16 or bfloat16 without a copy in float32.

    Everything else is left to Keras's layer, from which this one is derived:

    - inference, and a layer with ``trainable=False``, which are arithmetic on elements by the
      framework's own operators: every compiler and file format takes them;
    - a `mask`, ``synchronized=True`` and ``renorm=True``.

    Works with the TensorFlow, PyTorch and JAX backends of Keras 3. With TensorFlow the training
    step runs eagerly and in a `tf.function`, but XLA cannot compile it. The layer says so to Keras
    (``supports_jit``): ``model.compile(jit_compile="auto")`` does without, and ``True`` is a
    warning of Keras's.

    Parameters
    ----------
    *args, **kwargs
        As of `keras.layers.BatchNormalization`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not COMPILED_BY_XLA:
            self.supports_jit = False

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the normalised inputs, and in training update the moving statistics."""
        given = keras.backend.standardize_dtype(inputs.dtype)
        special = mask is not None or self.synchronized or self.renorm
        # Of what is no real number Keras's layer says what it has to say.
        special = special or not given.startswith(_NUMBERS)
        if special or not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        wide = "float64" if given == "float64" else "float32"
        # Keras computes in the wide type. The kernels take an input of 16 bits as it is, so here
        # that is for results of another type than the input.
        if given != self.compute_dtype:
            inputs = keras.ops.cast(inputs, wide)
        gamma = keras.ops.cast(self.gamma, wide) if self.scale else None
        beta = keras.ops.cast(self.beta, wide) if self.center else None
        y, mean, variance = batch_norm(inputs, gamma, beta, epsilon=self.epsilon, axis=self.axis)
        for moving, current in ((self.moving_mean, mean), (self.moving_variance, variance)):
            past = keras.ops.cast(moving, wide)
            moving.assign(past * self.momentum + current * (1.0 - self.momentum))
        return keras.ops.cast(y, self.compute_dtype)


# A file that names this layer is read again by whoever has imported this module.
keras.saving.register_keras_serializable(package="backnorm")(BatchNormalization)
