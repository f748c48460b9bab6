"""Training steps with Keras on TensorFlow, each a `tf.function`, like that of `fit`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

import backnorm
from backnorm.steps import MOMENTUM, RATE
from benchmarks.models.cases import Case
from benchmarks.models.steps import CLASSES, limit_processors

__all__ = ["Trainer", "start"]


def start(threads: int) -> dict[str, str]:
    """Limit this process to `threads` threads; return versions of packages."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # TensorFlow's settings limit its own threads, but not those of oneDNN and Eigen.
    limit_processors(threads)
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    return {
        "backnorm": backnorm.__version__,
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
    }


class Trainer:
    """See `steps.Trainer`."""

    def __init__(self, case: Case) -> None:
        self._case = case
        count, channels, *space = case.shape
        self._x = np.random.default_rng(0).standard_normal((count, *space, channels), np.float32)
        self._weights = self._made().get_weights()

    def step(self, variant: str) -> _Step:
        """Return a step of a variant."""
        from backnorm.keras import convert

        model = self._made()
        model.set_weights(self._weights)
        if variant != "keras":
            convert(model, arithmetic="float32" if variant == "backnorm-float32" else None)
        return _Step(model, self._x)

    def exact(self) -> list[np.ndarray]:
        """Return the gradients of all parameters in float64."""
        import keras

        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("float64")
        try:
            wide = self._made()
        finally:
            keras.config.set_dtype_policy(policy)
        wide.set_weights(self._weights)
        return _Step(wide, self._x.astype(np.float64)).gradients()

    def _made(self) -> Any:
        import keras

        keras.utils.set_random_seed(0)
        _, channels, *space = self._case.shape
        return keras.applications.ResNet50(
            weights=None,
            classes=CLASSES,
            input_shape=(*space, channels),
            classifier_activation=None,
        )


class _Step:
    """A training step of a model."""

    def __init__(self, model: Any, x: np.ndarray) -> None:
        import keras
        import tensorflow as tf

        from backnorm.keras import BatchNormalization

        every = model._flatten_layers(include_self=False)
        self.layers = sum(isinstance(each, BatchNormalization) for each in every)
        self.fused = 0
        x, labels = tf.constant(x), tf.range(len(x)) % CLASSES
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype=x.dtype.name)
        optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM)
        optimizer.build(model.trainable_variables)

        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply(gradients, model.trainable_weights)
            # A second function for the gradients would take as long again to trace.
            return gradients

        self._step = tf.function(step)

    def __call__(self) -> None:
        """Make a step."""
        self._step()

    def gradients(self) -> list[np.ndarray]:
        """Make a step; return the gradients of all parameters before it."""
        return [each.numpy() for each in self._step()]

    def normalization(self) -> None:
        """Return None, because additions of a graph may have nothing to do with normalisation."""
