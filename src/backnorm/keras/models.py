"""A model with its batch-normalisation layers exchanged, there and back."""

from __future__ import annotations

from typing import Any

import keras

from backnorm.errors import ArgumentTypeError
from backnorm.keras.layer import BatchNormalization

__all__ = ["convert", "revert"]


def convert(model: Any) -> Any:
    """Return a copy of a model in which backnorm computes batch normalisation.

    Parameters
    ----------
    model : keras.Model
        Functional or sequential, with models of these kinds in it. Layers of the class
        `keras.layers.BatchNormalization` are exchanged, in these models too; of a class derived
        from it not, because what that does is not known, and none that another layer wraps
        (`keras.layers.TimeDistributed`).

    Returns
    -------
    keras.Model
        Has the same layers by name and configuration, and the values of the weights. If the model
        is compiled, so is the copy, with an optimizer that starts anew.

    Raises
    ------
    ArgumentTypeError
        For a subclassed model: Keras cannot copy what its `call` does. Write
        `backnorm.keras.BatchNormalization` there instead.
    """
    return _exchanged(model, keras.layers.BatchNormalization, BatchNormalization)


def revert(model: Any) -> Any:
    """Return a copy of a model with Keras's own batch-normalisation layers; undoes `convert`.

    What it saves can be loaded where backnorm is not installed. Parameters, results and errors are
    those of `convert`.
    """
    return _exchanged(model, BatchNormalization, keras.layers.BatchNormalization)


def _exchanged(model: Any, old: type, new: Any) -> Any:
    # An object can say that it is of any class: `isinstance` believes it.
    if not issubclass(type(model), keras.Model):
        raise _refused(model, "must be a model")

    def copied(layer: Any) -> Any:
        kind = new if type(layer) is old else type(layer)
        return kind.from_config(layer.get_config())

    try:
        result = keras.models.clone_model(model, clone_function=copied, recursive=True)
    except ValueError as error:
        raise _refused(model, f"Keras cannot copy it ({error})") from error
    if model.built:
        result.set_weights(model.get_weights())
    return result


def _refused(model: object, problem: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        "model",
        problem,
        came=type(model).__name__,
        accepted="a functional or sequential keras.Model",
    )
