"""Keras's layer, with the training step computed by backnorm."""

from __future__ import annotations

from typing import Any

import keras

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.keras.backends import batch_norm, batch_norm_synchronised
from backnorm.scalars import check_flag

__all__ = ["BatchNormalization"]

_NUMBERS = ("float", "bfloat", "int", "uint", "bool")


class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, its training step computed by backnorm.

    Arguments (with two more), weights, configuration, moving statistics and results are those of
    Keras's layer; the weights of one are those of the other. What is computed here is the forward
    and the backward pass of a training step (``training=True``, and the layer trainable): to one
    rounding unless `arithmetic` asks for less, in one pass over the input each, and of an input of
    float16 or bfloat16 without a copy in float32.

    Everything else is left to Keras's layer, from which this one is derived:

    - inference, and a layer with ``trainable=False``, which are arithmetic on elements by the
      framework's own operators: every compiler and file format takes them;
    - a `mask` and ``renorm=True``, and a batch without elements.

    With ``synchronized=True`` (TensorFlow) statistics and gradients are those of the batch of all
    replicas of a `tf.distribute.Strategy`, as one device would compute them, however the batch is
    cut. Such a layer is differentiable once.

    Works with the TensorFlow, PyTorch and JAX backends of Keras 3. With TensorFlow the training
    step runs eagerly and in a `tf.function`; where XLA compiles it (``jit_compile=True``), formulas
    stand in for the kernels, with results as exact (`backnorm.tensorflow.batch_norm`).

    Parameters
    ----------
    *args, **kwargs
        As of `keras.layers.BatchNormalization`.
    arithmetic : {"float32", "float64"}, optional
        What a training step computes elements in, and short runs of sums adds up in. None: what
        holds when it is run, or traced (`backnorm.arithmetic`). It is part of the configuration
        if it is given.
    reproducible : bool
        Whether outputs, statistics and gradients of a training step have the same bits however
        samples are ordered, and if it is synchronized on any number of replicas, however they share
        the batch: sums are added up as integers, which takes longer. The gradients of gamma and
        beta are then those of the whole batch in the first replica, and zero in the others, so that
        what an optimizer adds up is rounded once. Such a layer is differentiable once. It is part
        of the configuration if it is True.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For another arithmetic, and for `reproducible` that is no boolean. When it is called, for
        float32 beside inputs of float64; and of a reproducible layer in training for what has no
        reproducible sums: a mask, ``renorm=True``, and with TensorFlow a step that XLA compiles.
    """

    # A layer that `convert` made has not been through `__init__`.
    arithmetic: Arithmetic | None = None
    reproducible: bool = False

    def __init__(
        self,
        *args: Any,
        arithmetic: Arithmetic | None = None,
        reproducible: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if arithmetic is not None:
            self.arithmetic = check_arithmetic(arithmetic)
        if check_flag("reproducible", reproducible):
            self.reproducible = True

    def get_config(self) -> dict[str, Any]:
        """Return the configuration of Keras's layer; with `arithmetic`, `reproducible` if set."""
        config: dict[str, Any] = super().get_config()
        if self.arithmetic is not None:
            config["arithmetic"] = self.arithmetic
        if self.reproducible:
            config["reproducible"] = True
        return config

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the normalised inputs, and in training update the moving statistics."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        special = mask is not None or self.renorm
        if self.reproducible and special and training and self.trainable:
            raise ArgumentValueError(
                "reproducible",
                "there are no reproducible sums of a layer with a mask or renorm=True, which Keras "
                "computes",
                came=True,
                accepted="False there",
            )
        # Keras's layer raises its own error for an input that is no real number.
        special = special or not dtype.startswith(_NUMBERS)
        # A replica without elements takes part in the exchange. If no replica has elements, the
        # statistics are 0, as those of Keras's layer.
        shape = () if self.synchronized else tuple(inputs.shape)
        if special or 0 in shape or not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        wide = "float64" if dtype == "float64" else "float32"
        # Keras computes in the wide type. The kernels read 16-bit inputs themselves, so the cast is
        # for results of another type than the input.
        if dtype != self.compute_dtype:
            inputs = keras.ops.cast(inputs, wide)
        gamma = keras.ops.cast(self.gamma, wide) if self.scale else None
        beta = keras.ops.cast(self.beta, wide) if self.center else None
        one = _one_unless_empty(inputs, wide) if None in shape else None
        if one is not None and gamma is not None:
            gamma = gamma * one
        options = {"epsilon": self.epsilon, "axis": self.axis, "arithmetic": self.arithmetic}
        options |= {"reproducible": True} if self.reproducible else {}
        normalise = batch_norm_synchronised if self.synchronized else batch_norm
        y, mean, variance = normalise(inputs, gamma, beta, **options)
        for moving, current in ((self.moving_mean, mean), (self.moving_variance, variance)):
            past = keras.ops.cast(moving, wide)
            current = current if one is None else current * one
            moving.assign(past * self.momentum + current * (1.0 - self.momentum))
        return keras.ops.cast(y, self.compute_dtype)


def _one_unless_empty(inputs: Any, dtype: str) -> Any:
    """Return 1, or NaN for an empty batch, whose size is not known while tracing.

    Statistics and the gradient of gamma, multiplied by it, are those of Keras's layer.
    """
    empty = keras.ops.equal(keras.ops.size(inputs), 0)
    return keras.ops.cast(keras.ops.where(empty, float("nan"), 1.0), dtype)


# A file that names this layer is read again by whoever has imported this module.
keras.saving.register_keras_serializable(package="backnorm")(BatchNormalization)
