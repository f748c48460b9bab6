"""Keras's layer, with the training step computed by backnorm."""

from __future__ import annotations

from typing import Any

import keras

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.keras.backends import batch_norm
from backnorm.scalars import check_flag

_NUMBERS = ("float", "bfloat", "int", "uint", "bool")


class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization` with the training step computed by backnorm.

    The layer has two more arguments, `arithmetic` and `reproducible`. All other arguments and the
    weights are those of Keras's layer. Results, including moving statistics, differ from those of
    Keras's layer by rounding only. Weights can be loaded from either layer into the other. backnorm
    computes the forward and the backward pass of a training step, that is, of a call with
    ``training=True`` of a layer that is trainable. Results are rounded once unless `arithmetic` is
    "float32". The kernels read a float16 or bfloat16 input directly; no
    float32 copy of it is made.

    The base class, Keras's layer, computes everything else:

    - inference, and every call of a layer with ``trainable=False``. Keras computes such calls by
      the framework's own elementwise operators, which compilers and file formats support;
    - calls with a `mask`, layers with ``renorm=True`` or ``synchronized=True``, and batches whose
      shape shows that they have no elements. Unlike in Keras's layer, elements outside the mask
      that are NaN or infinite do not change the gradients.

    The layer works with the TensorFlow, PyTorch and JAX backends of Keras 3. With TensorFlow, the
    training step runs eagerly and in a `tf.function`. If XLA compiles the step
    (``jit_compile=True``), the layer computes its results by TensorFlow's own operations instead of
    the kernels. These results are as accurate as those of the kernels (see
    `backnorm.tensorflow.batch_norm`).

    Parameters
    ----------
    *args, **kwargs
        The arguments of `keras.layers.BatchNormalization`.
    arithmetic : {"float32", "float64"}, optional
        The type in which a training step computes elements and adds up short runs of terms. None:
        the setting of `backnorm.arithmetic` when the step is run or traced. The configuration
        contains `arithmetic` unless it is None.
    reproducible : bool
        Whether outputs, statistics and gradients of a training step have the same bits for every
        order of the samples. Sums are then computed with integers, which takes longer. A
        reproducible layer is differentiable once. The configuration contains `reproducible` if it
        is True.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If `arithmetic` is unknown, or `reproducible` is not a boolean. In a call, if `arithmetic`
        is float32 and inputs are float64. In a training step of a reproducible layer, if there is a
        mask, if ``renorm=True`` or ``synchronized=True``, or, with TensorFlow, if XLA compiles the
        step.
    """

    # These two defaults are attributes of the class, so that a converted layer has them, too:
    # `convert` does not call `__init__`.
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
        """Return Keras's configuration, with `arithmetic` and `reproducible` if they are set."""
        config: dict[str, Any] = super().get_config()
        if self.arithmetic is not None:
            config["arithmetic"] = self.arithmetic
        if self.reproducible:
            config["reproducible"] = True
        return config

    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        """Return the normalised inputs, and in training update the moving statistics."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        special = mask is not None or self.renorm or self.synchronized
        if self.reproducible and special and training and self.trainable:
            raise ArgumentValueError(
                "reproducible",
                "must be False with a mask, renorm=True or synchronized=True, which Keras computes",
                came=True,
                accepted="False",
            )
        # If the input does not consist of real numbers, Keras's layer is called, and raises its own
        # error.
        special = special or not dtype.startswith(_NUMBERS)
        shape = tuple(inputs.shape)
        # Keras's layer raises an error for a mask of another rank.
        if mask is not None and len(mask.shape) == len(inputs.shape) - 1:
            # An element outside the mask may be NaN. Its term in a sum of the gradient would be
            # 0 * NaN, which is NaN, so Keras's layer gets 0 instead of such an element.
            valid = keras.ops.expand_dims(keras.ops.cast(mask, "bool"), -1)
            valid = keras.ops.logical_or(valid, keras.ops.isfinite(inputs))
            y = super().call(keras.ops.where(valid, inputs, 0), training=training, mask=mask)
            return keras.ops.where(valid, y, float("nan"))
        if special or 0 in shape or not (training and self.trainable):
            return super().call(inputs, training=training, mask=mask)
        wide = "float64" if dtype == "float64" else "float32"
        # Keras's own layer casts 16-bit inputs to float32. The kernels read 16-bit inputs directly,
        # so this layer casts them only if results have another type than the input.
        if dtype != self.compute_dtype:
            inputs = keras.ops.cast(inputs, wide)
        gamma = keras.ops.cast(self.gamma, wide) if self.scale else None
        beta = keras.ops.cast(self.beta, wide) if self.center else None
        one = _one_unless_empty(inputs, wide) if None in shape else None
        if one is not None and gamma is not None:
            gamma = gamma * one
        options = {"epsilon": self.epsilon, "axis": self.axis, "arithmetic": self.arithmetic}
        options |= {"reproducible": True} if self.reproducible else {}
        y, mean, variance = batch_norm(inputs, gamma, beta, **options)
        for moving, current in ((self.moving_mean, mean), (self.moving_variance, variance)):
            past = keras.ops.cast(moving, wide)
            current = current if one is None else current * one
            moving.assign(past * self.momentum + current * (1.0 - self.momentum))
        return keras.ops.cast(y, self.compute_dtype)


def _one_unless_empty(inputs: Any, dtype: str) -> Any:
    """Return 1, or NaN for an empty batch.

    The number is a tensor, because the size of the batch is unknown during tracing. In Keras's
    layer, an empty batch gives NaN as the statistics and as the gradient of gamma. Multiplying
    gamma and the statistics by this number has the same effect here.
    """
    empty = keras.ops.equal(keras.ops.size(inputs), 0)
    return keras.ops.cast(keras.ops.where(empty, float("nan"), 1.0), dtype)


# After the import of this module, Keras can load files that contain this layer.
keras.saving.register_keras_serializable(package="backnorm")(BatchNormalization)
