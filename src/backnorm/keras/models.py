"""Replace the batch-normalisation layers of a model by backnorm's, and restore Keras's."""

from __future__ import annotations

import warnings
from typing import Any

import keras

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentTypeError
from backnorm.keras.layer import BatchNormalization
from backnorm.scalars import check_flag

_THEIRS = keras.layers.BatchNormalization
# Keras stores the traced steps of a model in these attributes of the model.
_TRACED = ("train_function", "test_function", "predict_function")


class ConversionWarning(UserWarning):
    """A model has no layer that `convert` can convert."""


def convert(
    model: Any, *, arithmetic: Arithmetic | None = None, reproducible: bool | None = None
) -> Any:
    """Let backnorm compute the batch normalisation of a model.

    Every layer of the class `keras.layers.BatchNormalization` that Keras finds in `model`,
    including `model` itself, becomes a layer of `backnorm.keras` in place: only the layer's class
    changes. The layer stays the same object, with the same variables and settings. Layers of
    derived classes do not change, because their behaviour is not known.

    Parameters
    ----------
    model : keras.Layer
        A model of any kind (functional, sequential, subclassed), or a layer, built or not. Its
        layers may be in attributes, lists, dictionaries, inner models and wrappers
        (`keras.layers.TimeDistributed`), and may be shared.
    arithmetic : {"float32", "float64"}, optional
        The arithmetic of all layers of `backnorm.keras` in the model, including layers that were
        converted before (`BatchNormalization.arithmetic`). None: layers keep their arithmetic.
    reproducible : bool, optional
        Whether a training step of all these layers has the same bits for every order of the batch
        (`BatchNormalization.reproducible`). None: layers keep their setting.

    Returns
    -------
    keras.Layer
        `model`. A compiled model stays compiled, and its optimizer keeps its state.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If `model` is not a Keras layer, `arithmetic` is unknown, or `reproducible` is not a
        boolean.

    Warns
    -----
    ConversionWarning
        If `model` has no layer that can be converted, and none that was converted before.

    Notes
    -----
    Keras traces the steps of `fit`, `evaluate` and `predict` again, for `model` and models in it.
    Your own `tf.function` or `jax.jit`, and a model that contains `model`, keep their traces, so
    convert before they first run.
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
            + ("" if model.built else " (it is not built: layers made by build() are missing)"),
            ConversionWarning,
            stacklevel=2,
        )
    return model


def revert(model: Any) -> Any:
    """Undo `convert` in place: Keras's layers compute the batch normalisation of a model again.

    The model can then be saved and loaded where backnorm is not installed. `model`, the result and
    the errors are as in `convert`.
    """
    for layer in _ours(_layers(model)):
        # Keras's layer does not have these attributes, so they are removed.
        for name in ("arithmetic", "reproducible"):
            vars(layer).pop(name, None)
    _exchange(model, BatchNormalization, _THEIRS)
    return model


def _ours(layers: list[Any]) -> list[Any]:
    return [layer for layer in layers if type(layer) is BatchNormalization]


def _layers(model: Any) -> list[Any]:
    """Return all layers of a model, including the model, or raise if it is not a Keras layer."""
    # The check does not use `isinstance`, because `isinstance` reads the attribute `__class__`,
    # which an object can override.
    if not issubclass(type(model), keras.Layer):
        raise ArgumentTypeError(
            "model",
            "must be a model or another layer of Keras",
            came=type(model).__name__,
            accepted="a keras.Model or keras.Layer",
        )
    return list(model._flatten_layers())


def _exchange(model: Any, old: type, new: type) -> list[Any]:
    """Change the class of every layer of class `old` to `new`; return all layers of the model.

    The functions that Keras has traced are discarded, so that Keras traces them again.
    """
    layers = _layers(model)
    for layer in layers:
        if type(layer) is old:
            layer.__class__ = new
    for layer in layers:
        for name in _TRACED:
            if getattr(layer, name, None) is not None:
                setattr(layer, name, None)
    return layers
