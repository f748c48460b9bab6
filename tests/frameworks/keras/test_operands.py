"""The layer called with inputs of every kind after a good call; made with options of every kind.

What Keras's own layer gives or raises, or the documented error of ours.
"""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest

import backnorm
from backnorm.errors import shown
from backnorm.keras import BatchNormalization, convert, revert

from ...support.kinds import kinds, values

pytestmark = pytest.mark.long

Theirs = keras.layers.BatchNormalization
# What ends the process in TensorFlow, where Keras makes a tensor of it.
ENDING = ("a float that raises",)
# What does not end; and what is all rounding in Keras's result, where ours is exact.
LEFT_OUT = (*ENDING, "an iterator without an end", "one number everywhere")


def array():
    return np.random.default_rng(0).normal(0.5, 2, (6, 4, 3, 5)).astype("f")


def attempt(function, *args, **kwargs):
    """Return the result of a call as an array, or the error."""
    with warnings.catch_warnings():
        # Keras gives some of its own.
        warnings.simplefilter("ignore")
        try:
            return keras.ops.convert_to_numpy(function(*args, **kwargs))
        except Exception as error:
            return error


def difference(own, theirs, tolerance):
    """Return what is wrong with our result beside Keras's, or None."""
    if isinstance(own, backnorm.ArgumentError):
        return None
    if isinstance(own, Exception):
        same = type(own) is type(theirs)
        return None if same else f"not ours: {type(own).__name__}: {shown(own, str)}"
    if isinstance(theirs, Exception):
        return f"a result, where Keras raises {shown(theirs, str)}"
    if own.shape != theirs.shape or own.dtype != theirs.dtype:
        return f"{own.dtype}{own.shape} instead of {theirs.dtype}{theirs.shape}"
    largest = np.abs(theirs.astype(float)).max(initial=1.0)
    close = np.allclose(own, theirs, rtol=0, atol=tolerance * largest, equal_nan=True)
    return None if close else "another result"


@pytest.mark.parametrize("options", [{}, {"axis": 1, "scale": False}], ids=str)
def test_layer_with_hostile_input_matches_keras_or_raises_argument_error(options):
    good, wrong, count = array(), [], 0
    layers = BatchNormalization(**options), Theirs(**options)
    for layer in layers:
        layer(good, training=True)
    for kind in kinds(good):
        if kind.label in LEFT_OUT:
            continue
        count += 1
        found = []
        for layer in layers:
            layer(good, training=True)
            found.append(attempt(layer, kind.value, training=True))
        digits = 1e-2 if "float16" in kind.label else 5e-6
        if what := difference(*found, digits):
            wrong.append(f"{kind.label}: {what}")
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong)
    assert count > 140


@pytest.mark.parametrize(
    "option", ["axis", "momentum", "epsilon", "center", "scale", "beta_initializer", "trainable"]
)
def test_layer_with_hostile_option_matches_keras_or_raises_argument_error(option):
    good, wrong = array(), []
    for kind in values():
        if kind.label in LEFT_OUT:
            continue
        found = [
            attempt(lambda layer, value: layer(**{option: value})(good, training=True), each, value)
            for each, value in ((BatchNormalization, kind.value), (Theirs, kind.value))
        ]
        if what := difference(*found, 5e-6):
            wrong.append(f"{kind.label}: {what}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("function", [convert, revert])
def test_convert_rejects_other_types_than_models(function):
    for kind in values():
        with pytest.raises(backnorm.ArgumentTypeError, match=r"^model: "):
            function(kind.value)
