"""Batch normalisation in TensorFlow, computed by backnorm.

The functions `batch_norm`, `batch_norm_inference` and `batch_norm_backward` take and return
tensors. They work in eager mode and in a `tf.function`, and TensorFlow can differentiate them.
`BatchNormalization` is Keras's layer, computed by these functions. `convert` replaces the layers of
a model by `BatchNormalization`; `revert` undoes the conversion. `BatchNormalization`, `convert` and
`revert` are names of `backnorm.keras`, which is imported when one of them is first used.
"""

from typing import Any

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

_OF_KERAS = ("BatchNormalization", "ConversionWarning", "convert", "revert")

__all__ = [
    "BatchNormalization",
    "ConversionWarning",
    "Gradients",
    "Normalized",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_inference",
    "convert",
    "revert",
]


def __getattr__(name: str) -> Any:
    if name in _OF_KERAS:
        import backnorm.keras as of_keras

        return getattr(of_keras, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_KERAS})
