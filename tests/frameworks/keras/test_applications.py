"""All models of keras.applications with batch normalisation: converted, the same step; reverted."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from backnorm.keras import BatchNormalization, convert, revert

Theirs = keras.layers.BatchNormalization
QUICK = ("MobileNet",)
FEW = ("EfficientNetB0", "ResNet50")
# Other models take images of 32 x 32.
SMALLEST = {"InceptionResNetV2": 75, "InceptionV3": 75, "Xception": 71}
# They have none.
WITHOUT = ("ConvNeXt", "VGG")


def names():
    found = [name for name in dir(keras.applications) if name[0].isupper()]
    assert {*QUICK, *FEW} < set(found)
    return [name for name in found if not name.startswith(WITHOUT)]


@pytest.fixture(autouse=True)
def float64(backend, set_policy):
    """Have models compute in a type in which what a hundred layers make of rounding is small."""
    if backend != "tensorflow":
        pytest.skip("JAX has float64 by a setting alone, and Keras's layer with PyTorch has not")
    set_policy("float64")


def step(model, x, labels):
    """Return what a step of training computes: outputs, loss, gradients, and what has moved."""
    import tensorflow as tf

    with tf.GradientTape() as tape:
        y = model(x, training=True)
        loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(labels, y))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    moved = [v for v in model.non_trainable_variables if v.name.startswith("moving")]
    results = [loss, y, *gradients, *moved, model(x, training=False)]
    return [keras.ops.convert_to_numpy(r) for r in results]


def check(name, rng):
    keras.utils.set_random_seed(1)
    size = SMALLEST.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=5)
    x, labels = rng.uniform(0, 255, (4, size, size, 3)), np.arange(4)
    # Among them are the states of random generators, for what is dropped.
    start = [v.numpy() for v in model.variables]

    def again():
        for variable, value in zip(model.variables, start, strict=True):
            variable.assign(value)
        return step(model, x, labels)

    expected = again()
    layers = [each for each in model._flatten_layers() if type(each) is Theirs]
    assert layers
    convert(model)
    assert {type(each) for each in layers} == {BatchNormalization}
    found = again()
    revert(model)
    assert {type(each) for each in layers} == {Theirs}
    back = again()
    largest = max(np.abs(each).max() for each in expected[2:-1])
    assert largest > 1e-3
    for own, theirs, reverted in zip(found, expected, back, strict=True):
        # Of biases before a normalisation gradients are rounding alone.
        scale = max(np.abs(theirs).max(), 1e-3 * largest)
        np.testing.assert_allclose(own, theirs, rtol=0, atol=1e-7 * scale)
        np.testing.assert_allclose(reverted, theirs, rtol=0, atol=1e-7 * scale)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in FEW)]
)
def test_converted_and_reverted_application_matches_step_of_keras(name, rng):
    check(name, rng)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [name for name in names() if name not in (*QUICK, *FEW)])
def test_converted_and_reverted_other_application_matches_step_of_keras(name, rng):
    check(name, rng)
