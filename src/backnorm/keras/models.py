"""A model with its batch-normalisation layers exchanged, there and back."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentTypeError
from backnorm.keras.layer import BatchNormalization
from backnorm.scalars import check_flag

__all__ = ["ConversionWarning", "convert", "revert"]

_THEIRS = keras.layers.BatchNormalization
# What Keras made of a model's step when it first ran.
_TRACED = ("train_function", "test_function", "predict_function")


class ConversionWarning(UserWarning):
    """A model has nothing that `convert` can convert."""


def convert(
    model: Any, *, arithmetic: Arithmetic | None = None, reproducible: bool | None = None
) -> Any:
    """Have backnorm compute the batch normalisation of a model.

    Every layer of the class `keras.layers.BatchNormalization` that Keras finds in `model`, itself
    included, becomes one of `backnorm.keras`, in place: layers stay the same objects, with their
    variables and settings, and only their class changes. Those of a derived class stay as they
    are, because what they do is not known.

    Parameters
    ----------
    model : keras.Layer
        A model of any kind (functional, sequential, subclassed), or a layer, built or not, with
        layers in attributes, lists and dictionaries, models within models, and layers that others
        wrap (`keras.layers.TimeDistributed`) or share.
    arithmetic : {"float32", "float64"}, optional
        That of all layers of `backnorm.keras` that there are then, also of those that were there
        before (`BatchNormalization.arithmetic`). None: they keep theirs.
    reproducible : bool, optional
        Whether a training step of all these layers has the same bits however the batch is ordered
        and cut (`BatchNormalization.reproducible`). None: they do what they did.

    Returns
    -------
    keras.Layer
        `model`. If it is compiled it stays so, and the optimizer has its state.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is no layer of Keras, for another arithmetic, and for `reproducible` that is no
        boolean.

    Warns
    -----
    ConversionWarning
        If `model` has no layer that can be converted, and none that was.

    Notes
    -----
    What Keras traced for `fit`, `evaluate` and `predict` of `model`, and of models in it, is traced
    again. A `tf.function` or `jax.jit` of your own, and a model that has this one in it, keep what
    they traced: convert before they run.
    """
    if arithmetic is not None:
        arithmetic = check_arithmetic(arithmetic)
    if reproducible is not None:
        reproducible = check_flag("reproducible", reproducible)
    layers = _exchange(model, _THEIRS, BatchNormalization)
    ours = _ours(layers)
    for name, value in (("arithmetic", arithmetic), ("reproducible", reproducible)):
        for layer in ours if value is not None else ():
            setattr(layer, name, value)
    if not ours:
        kinds = {type(layer) for layer in layers}
        derived = sorted(kind.__name__ for kind in kinds if issubclass(kind, _THEIRS))
        warnings.warn(
            "nothing was converted: the model has no layer of keras.layers.BatchNormalization"
            + (f", only of classes derived from it: {', '.join(derived)}" if derived else "")
            + ("" if model.built else " (it is not built: layers that it makes then come later)"),
            ConversionWarning,
            stacklevel=2,
        )
    return model


def revert(model: Any) -> Any:
    """Undo `convert`: Keras computes the batch normalisation of a model again, in place.

    What it saves can be loaded where backnorm is not installed. Parameters, results and errors are
    those of `convert`.
    """
    for layer in _ours(_layers(model)):
        # Keras's layer has no such attributes.
        for name in ("arithmetic", "reproducible"):
            vars(layer).pop(name, None)
    _exchange(model, BatchNormalization, _THEIRS)
    return model


def _ours(layers: list[Any]) -> list[Any]:
    return [layer for layer in layers if type(layer) is BatchNormalization]


def _layers(model: Any) -> list[Any]:
    """Return all layers of a model, itself included, or raise if it is none."""
    # An object can say that it is of any class: `isinstance` believes it.
    if not issubclass(type(model), keras.Layer):
        raise ArgumentTypeError(
            "model",
            "must be a model or another layer of Keras",
            came=type(model).__name__,
            accepted="a keras.Model or keras.Layer",
        )
    return list(model._flatten_layers())


def _exchange(model: Any, old: type, new: type) -> list[Any]:
    """Give layers another class; return all layers."""
    layers = _layers(model)
    for layer in layers:
        if type(layer) is old:
            layer.__class__ = new
    for layer in layers:
        for name in _TRACED:
            if getattr(layer, name, None) is not None:
                setattr(layer, name, None)
    return layers
