"""Models: converted and reverted, saved and loaded, weights carried over."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from backnorm import ArgumentTypeError
from backnorm.keras import BatchNormalization, convert, revert

Theirs = keras.layers.BatchNormalization


@pytest.fixture
def model(rng):
    """Return a model with layers of its own, of a model in it, and one that is used twice."""
    inputs = keras.Input((6, 6, 4))
    x = Theirs(name="first")(inputs)
    inner = keras.Sequential(
        [keras.Input((6, 6, 4)), Theirs(axis=1, name="inner_norm"), keras.layers.Conv2D(4, 1)],
        name="inner",
    )
    shared = Theirs(scale=False, name="shared")
    x = shared(inner(shared(x)))
    x = keras.layers.Dropout(0.5, seed=1)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, keras.layers.Dense(3)(x), name="whole")
    model.get_layer("first").trainable = False
    for variable in model.weights:
        variable.assign(rng.uniform(0.5, 2.0, variable.shape))
    return model


def kinds(model):
    found = {}
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            found |= kinds(layer)
        elif isinstance(layer, Theirs):
            found[layer.name] = type(layer)
    return found


def same(one, other, x):
    assert [w.name for w in one.weights] == [w.name for w in other.weights]
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.predict(x, verbose=0), other.predict(x, verbose=0))


@pytest.fixture
def x(rng):
    """Return a batch for the model."""
    return rng.normal(size=(5, 6, 6, 4)).astype("f")


NAMES = ("first", "inner_norm", "shared")


def test_convert_and_revert(model, x):
    converted = convert(model)
    assert kinds(model) == dict.fromkeys(NAMES, Theirs)
    assert kinds(converted) == dict.fromkeys(NAMES, BatchNormalization)
    same(model, converted, x)
    assert not converted.get_layer("first").trainable
    # A layer that is used twice is one layer still.
    assert len(converted.get_layer("shared")._inbound_nodes) == 2
    reverted = revert(converted)
    assert kinds(reverted) == dict.fromkeys(NAMES, Theirs)
    same(model, reverted, x)


def test_a_converted_model_is_compiled_if_the_model_is(model, x):
    assert not convert(model).compiled
    model.compile(keras.optimizers.Adam(0.125), "mse")
    converted = convert(model)
    assert float(converted.optimizer.learning_rate) == 0.125
    assert converted.optimizer is not model.optimizer
    converted.fit(x, np.zeros((5, 3), "f"), verbose=0)


def test_a_model_without_weights_yet_is_converted():
    model = keras.Sequential([keras.layers.Dense(3), Theirs(name="norm")])
    converted = convert(model)
    assert kinds(converted) == {"norm": BatchNormalization}
    assert converted(np.ones((2, 4), "f"), training=True).shape == (2, 3)


def test_derived_and_wrapped_layers_stay(rng):
    class Derived(Theirs):
        """Might do anything."""

    model = keras.Sequential(
        [
            keras.Input((3, 4)),
            Derived(name="derived"),
            keras.layers.TimeDistributed(Theirs(), name="wrapped"),
        ]
    )
    converted = convert(model)
    assert type(converted.get_layer("derived")) is Derived
    assert type(converted.get_layer("wrapped").layer) is Theirs


def test_what_cannot_be_copied_is_refused():
    class Subclassed(keras.Model):
        """Keras cannot copy what `call` does."""

        def call(self, inputs):
            return inputs

    with pytest.raises(ArgumentTypeError, match=r"model: Keras cannot copy it.*got Subclassed"):
        convert(Subclassed())
    with pytest.raises(ArgumentTypeError, match=r"model: must be a model; got Dense"):
        convert(keras.layers.Dense(3))


def test_a_file_is_read_by_who_has_imported_the_layer(model, x, tmp_path):
    converted = convert(model)
    path = tmp_path / "model.keras"
    converted.save(path)
    loaded = keras.models.load_model(path)
    assert kinds(loaded) == dict.fromkeys(NAMES, BatchNormalization)
    same(converted, loaded, x)
    np.savez(tmp_path / "case.npz", x=x, y=converted.predict(x, verbose=0))
    script = f"""
import keras, numpy as np
from backnorm.keras import BatchNormalization
with np.load({str(tmp_path / "case.npz")!r}) as case:
    y = keras.models.load_model({str(path)!r}).predict(case["x"], verbose=0)
    np.testing.assert_array_equal(y, case["y"])
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=False, env=os.environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_without_backnorm_a_file_of_ours_is_read_as_keras_layers(model, x, tmp_path, monkeypatch):
    path = tmp_path / "model.keras"
    convert(model).save(path)
    monkeypatch.delitem(keras.saving.get_custom_objects(), "backnorm>BatchNormalization")
    with pytest.raises(TypeError, match="Could not locate class 'BatchNormalization'"):
        keras.models.load_model(path)
    loaded = keras.models.load_model(path, custom_objects={"backnorm>BatchNormalization": Theirs})
    assert kinds(loaded) == dict.fromkeys(NAMES, Theirs)
    same(model, loaded, x)


def test_a_file_of_a_reverted_model_names_keras_alone(model, tmp_path):
    path = tmp_path / "model.keras"
    reverted = revert(convert(model))
    reverted.save(path)
    assert "backnorm" not in str(keras.saving.serialize_keras_object(reverted))
    assert kinds(keras.models.load_model(path)) == dict.fromkeys(NAMES, Theirs)


def test_weights_go_both_ways(model, x, tmp_path):
    converted = convert(model)
    for variable in converted.weights:
        variable.assign(variable.value * 0.5)
    path = tmp_path / "some.weights.h5"
    converted.save_weights(path)
    model.load_weights(path)
    same(converted, model, x)
    model.save_weights(path)
    again = convert(model)
    again.load_weights(path)
    same(again, model, x)


def test_an_exported_model_is_of_the_frameworks_operators_alone(model, x, tmp_path, backend):
    if backend != "tensorflow":
        pytest.skip("JAX and PyTorch export through other packages")
    converted = convert(model)
    converted.export(tmp_path / "exported", verbose=False)
    np.savez(tmp_path / "case.npz", x=x, y=converted.predict(x, verbose=0))
    # Where nothing of ours has been imported: a call back to Python would find nobody.
    script = f"""
import sys, numpy as np, tensorflow as tf
served = tf.saved_model.load({str(tmp_path / "exported")!r})
with np.load({str(tmp_path / "case.npz")!r}) as case:
    np.testing.assert_allclose(served.serve(case["x"]), case["y"], rtol=1e-5, atol=1e-5)
assert "backnorm" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
