"""The functions that normalise a batch in training, for the current backend of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from backnorm.errors import BacknormError

_BACKEND = keras.backend.backend()


def _function() -> Callable[..., tuple[Any, Any, Any]]:
    if _BACKEND == "tensorflow":
        from backnorm.tensorflow import batch_norm as of_tensorflow

        return of_tensorflow
    if _BACKEND == "jax":
        from backnorm.jax import batch_norm as of_jax

        return of_jax
    if _BACKEND == "torch":
        from backnorm.keras.of_torch import batch_norm as of_torch

        return of_torch
    raise BacknormError(
        f"backnorm.keras does not support Keras's backend {_BACKEND!r}; set KERAS_BACKEND to "
        "'tensorflow', 'torch' or 'jax' before Keras is imported"
    )


#: The training-mode function of the adapter for Keras's backend, with the signature
#: batch_norm(x, gamma, beta, *, epsilon, axis, arithmetic, reproducible=False)
#: -> (y, mean, variance)
batch_norm = _function()
