"""Batch normalisation in Keras 3, computed by backnorm: TensorFlow, PyTorch and JAX backends.

`BatchNormalization` is `keras.layers.BatchNormalization` with the training step computed by
backnorm. `convert` replaces the layers of a model by backnorm's; `revert` undoes the conversion.
"""

from backnorm.errors import not_installed

try:
    import keras  # noqa: F401 (to raise an error that says what to install)
except ModuleNotFoundError as error:
    raise not_installed(error, "keras", __name__) from error

from backnorm.keras.layer import BatchNormalization
from backnorm.keras.models import ConversionWarning, convert, revert

__all__ = ["BatchNormalization", "ConversionWarning", "convert", "revert"]
