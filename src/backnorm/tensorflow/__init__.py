"""Batch normalisation in TensorFlow, computed by backnorm.

The functions `batch_norm`, `batch_norm_inference` and `batch_norm_backward` take and return
tensors. They work in eager mode and in a `tf.function`, and TensorFlow can differentiate them.
`backnorm.keras` has Keras's layer, computed by these functions.
"""

from backnorm.errors import not_installed

try:
    import tensorflow  # noqa: F401 (to raise an error that says what to install)
except ModuleNotFoundError as error:
    raise not_installed(error, "tensorflow", __name__) from error

from backnorm.tensorflow.operators import (
    Gradients,
    Normalized,
    batch_norm,
    batch_norm_backward,
    batch_norm_inference,
)

__all__ = [
    "Gradients",
    "Normalized",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_inference",
]
