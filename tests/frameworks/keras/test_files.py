"""Converted models saved and loaded, here and in a new process, with backnorm and without."""

from __future__ import annotations

import os
import subprocess
import sys

import keras
import numpy as np
import pytest

from backnorm.keras import BatchNormalization, convert, revert

Theirs = keras.layers.BatchNormalization
NAMES = ("first", "inner_norm")


@pytest.fixture
def model(rng):
    """Return a model with a model in it, and weights of any value."""
    inputs = keras.Input((6, 6, 4))
    inner = keras.Sequential(
        [keras.Input((6, 6, 4)), Theirs(axis=1, name="inner_norm"), keras.layers.Conv2D(4, 1)],
        name="inner",
    )
    x = keras.layers.GlobalAveragePooling2D()(inner(Theirs(name="first")(inputs)))
    model = keras.Model(inputs, keras.layers.Dense(3)(x), name="whole")
    for variable in model.weights:
        variable.assign(rng.uniform(0.5, 2.0, variable.shape))
    return model


@pytest.fixture
def x(rng):
    """Return a batch for the model."""
    return rng.normal(size=(5, 6, 6, 4)).astype("f")


def copied(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


def kinds(model):
    return {w.name: type(w) for w in model._flatten_layers() if isinstance(w, Theirs)}


def same(one, other, x):
    assert [w.name for w in one.weights] == [w.name for w in other.weights]
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(one.predict(x, verbose=0), other.predict(x, verbose=0))


def run(script, **environment):
    """Run a script in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_saved_model_in_new_process_loads_and_continues_training(model, x, tmp_path):
    """In a new process, which goes on training with the optimizer's state."""
    path, case = tmp_path / "model.keras", tmp_path / "case.npz"
    targets = np.sin(x[:, 0, 0, :3])
    convert(model).compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    model.fit(x, targets, verbose=0)
    model.save(path)
    loaded = keras.models.load_model(path)
    assert kinds(loaded) == dict.fromkeys(NAMES, BatchNormalization)
    same(model, loaded, x)
    before = model.predict(x, verbose=0)
    model.fit(x, targets, verbose=0)
    np.savez(case, x=x, targets=targets, y=before, trained=model.predict(x, verbose=0))
    run(f"""
import keras, numpy as np
from backnorm.keras import BatchNormalization
with np.load({str(case)!r}) as case:
    model = keras.models.load_model({str(path)!r})
    np.testing.assert_array_equal(model.predict(case["x"], verbose=0), case["y"])
    model.fit(case["x"], case["targets"], verbose=0)
    trained = model.predict(case["x"], verbose=0)
    np.testing.assert_allclose(trained, case["trained"], rtol=1e-5, atol=1e-5)
assert sum(type(each) is BatchNormalization for each in model._flatten_layers()) == 2
""")


@pytest.mark.long
def test_saved_model_without_backnorm_loads_with_custom_objects_only(model, x, tmp_path):
    path, case = tmp_path / "model.keras", tmp_path / "case.npz"
    convert(model).save(path)
    np.savez(case, x=x, y=model.predict(x, verbose=0))
    run(f"""
import keras, numpy as np, sys
try:
    keras.models.load_model({str(path)!r})
except TypeError as error:
    assert "Could not locate class 'BatchNormalization'" in str(error), error
    assert "backnorm" in str(error), error
else:
    raise AssertionError("loaded")
theirs = {{"backnorm>BatchNormalization": keras.layers.BatchNormalization}}
model = keras.models.load_model({str(path)!r}, custom_objects=theirs)
with np.load({str(case)!r}) as case:
    np.testing.assert_array_equal(model.predict(case["x"], verbose=0), case["y"])
assert "backnorm" not in sys.modules
""")


def test_saved_model_after_revert_loads_as_keras_layers(model, x, tmp_path):
    path = tmp_path / "model.keras"
    revert(convert(model)).save(path)
    assert "backnorm" not in str(keras.saving.serialize_keras_object(model))
    loaded = keras.models.load_model(path)
    assert kinds(loaded) == dict.fromkeys(NAMES, Theirs)
    same(loaded, model, x)


def test_weights_of_converted_and_plain_models_are_interchangeable(model, x, tmp_path):
    converted, path = convert(copied(model)), tmp_path / "some.weights.h5"
    for variable in converted.weights:
        variable.assign(variable.value * 0.5)
    converted.save_weights(path)
    model.load_weights(path)
    same(converted, model, x)
    for variable in model.weights:
        variable.assign(variable.value * 0.5)
    model.save_weights(path)
    converted.load_weights(path)
    same(converted, model, x)


@pytest.mark.long
@pytest.mark.parametrize("options", ["export", "tf.saved_model.save"])
def test_exported_tensorflow_model_runs_without_backnorm(model, x, tmp_path, backend, options):
    if backend != "tensorflow":
        pytest.skip("JAX and PyTorch export through other packages")
    import tensorflow as tf

    path, case = str(tmp_path / "exported"), tmp_path / "case.npz"
    # What was traced in training calls Python, and is not saved.
    convert(model).compile("sgd", "mse")
    model.fit(x, np.sin(x[:, 0, 0, :3]), verbose=0)
    if options == "export":
        model.export(path, verbose=False)
    else:
        tf.saved_model.save(model, path)
    np.savez(case, x=x, y=model.predict(x, verbose=0))
    # Where nothing of ours has been imported: a call back to Python would find nobody.
    run(f"""
import sys, numpy as np, tensorflow as tf
loaded = tf.saved_model.load({path!r})
with np.load({str(case)!r}) as case:
    (y,) = loaded.signatures["serving_default"](tf.constant(case["x"])).values()
    np.testing.assert_allclose(y, case["y"], rtol=1e-5, atol=1e-5)
assert "backnorm" not in sys.modules
""")


@pytest.mark.long
def test_saved_training_step_without_backnorm_raises_error_naming_operator(
    model, x, tmp_path, backend
):
    if backend != "tensorflow":
        pytest.skip("of TensorFlow's files")
    import tensorflow as tf

    path = str(tmp_path / "saved")
    convert(model)
    module = tf.Module()
    module.step = tf.function(
        lambda x: model(x, training=True), input_signature=[tf.TensorSpec([None, 6, 6, 4])]
    )
    module.model = model
    module.step(x)
    tf.saved_model.save(module, path)
    run(f"""
import tensorflow as tf
loaded = tf.saved_model.load({path!r})
try:
    loaded.step(tf.ones((5, 6, 6, 4)))
except tf.errors.InvalidArgumentError as error:
    assert "backnorm_batch_norm" in str(error), error
else:
    raise AssertionError("it ran")
""")
