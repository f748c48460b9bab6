"""Batch normalisation in Keras 3, computed by backnorm, with the backend that Keras has.

`BatchNormalization` is `keras.layers.BatchNormalization` with another computation of the training
step; `convert` and `revert` exchange the layers of a model.
"""

from backnorm.keras.layer import BatchNormalization
from backnorm.keras.models import ConversionWarning, convert, revert

__all__ = ["BatchNormalization", "ConversionWarning", "convert", "revert"]
