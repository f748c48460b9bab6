"""Reproducible layers: the bits of NumPy's functions, in any order; in models and in files."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import backnorm
from backnorm import ArgumentTypeError, ArgumentValueError
from backnorm import keras as ours
from tests.support.dtypes import BFLOAT16

Ours = ours.BatchNormalization
Theirs = keras.layers.BatchNormalization
SHAPE = (6, 14, 13, 5)


def canonical(layer, x, dy, data_format="NXC"):
    """Return y, the gradients and the statistics of a layer from NumPy's functions."""
    settings = {
        "epsilon": layer.epsilon,
        "data_format": data_format,
        "arithmetic": layer.arithmetic,
    }
    settings["reproducible"] = True
    gamma, beta = (keras.ops.convert_to_numpy(v) for v in (layer.gamma, layer.beta))
    y, mean, variance = backnorm.batch_norm_forward(x, gamma, beta, **settings)
    gradients = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **settings)
    return y, *gradients, mean, variance


def same(found, expected):
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other))


@pytest.fixture
def everything(step):
    """Return y, gradients and statistics of a step of a layer with momentum 0."""

    def call(layer, x, dy):
        return [*step(layer, x, dy), *layer.get_weights()[2:]]

    return call


POLICIES = ["float32", "mixed_float16", "mixed_bfloat16", "float64"]


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("policy", POLICIES)
def test_reproducible_layer_step_has_the_bits_of_numpy_functions(
    everything, filled, rng, backend, policy, axis
):
    if policy == "float64" and backend == "jax":
        pytest.skip("JAX has float64 only by a setting of the whole process")
    layer = filled(Ours(reproducible=True, momentum=0.0, axis=axis, dtype=policy), SHAPE)
    x, dy = rng.normal(20, 2, (2, *SHAPE))
    kind = {"mixed_float16": "float16", "mixed_bfloat16": BFLOAT16}
    elements = [each.astype(kind.get(policy, policy)) for each in (x, dy)]
    wide = [each.astype("d" if policy == "float64" else "f") for each in elements]
    expected = canonical(layer, *elements, data_format="NXC" if axis == -1 else "NCX")
    same(everything(layer, *wide), [each.astype(wide[0].dtype) for each in expected])


def test_reproducible_layer_with_permuted_samples_has_the_same_bits(everything, filled, rng):
    x, dy = rng.normal(20, 2, (2, *SHAPE)).astype("f")
    order = rng.permutation(len(x))

    def found(reproducible):
        # Of which more sums are rounded.
        options = {"arithmetic": "float32", "reproducible": reproducible}
        layer = filled(Ours(momentum=0.0, **options), SHAPE)
        weights = layer.get_weights()
        y, dx, *channels = everything(layer, x, dy)
        layer.set_weights(weights)
        mixed = everything(layer, x[order], dy[order])
        return (y[order], dx[order], *channels), mixed

    same(*found(reproducible=True))
    assert any((one != other).any() for one, other in zip(*found(reproducible=False), strict=True))


def test_config_contains_reproducible_only_if_true():
    layer = Ours(reproducible=True)
    config = layer.get_config()
    assert config.pop("reproducible") is True
    assert layer.reproducible is True
    assert config == Theirs(name=layer.name).get_config()
    assert Ours.from_config(layer.get_config()).reproducible
    silent = Ours()
    assert silent.reproducible is False
    assert silent.get_config() == Theirs(name=silent.name).get_config()


def model():
    return keras.Sequential([keras.Input((8, 8, 3)), Theirs(name="one"), Theirs(name="other")])


def reproducible(model):
    return [each.reproducible for each in model._flatten_layers() if type(each) is Ours]


def test_convert_sets_reproducible_and_revert_removes_it(tmp_path):
    made = ours.convert(model())
    assert reproducible(made) == [False] * 2
    ours.convert(made, reproducible=True)
    # They stay so, unless it is said that they do not.
    ours.convert(made)
    assert reproducible(made) == [True] * 2
    path = tmp_path / "model.keras"
    made.save(path)
    assert reproducible(keras.models.load_model(path)) == [True] * 2
    assert reproducible(keras.models.clone_model(made)) == [True] * 2
    ours.convert(made, reproducible=False)
    assert reproducible(made) == [False] * 2
    ours.revert(made)
    assert not any(hasattr(each, "reproducible") for each in made.layers)


@pytest.mark.parametrize("value", ["yes", 1])
def test_reproducible_rejects_other_types_than_bool(value):
    for call in (Ours, lambda reproducible: ours.convert(model(), reproducible=reproducible)):
        with pytest.raises(ArgumentTypeError, match=r"^reproducible: must be a boolean"):
            call(reproducible=value)


@pytest.mark.parametrize("special", ["mask", "renorm", "synchronized"])
def test_reproducible_layer_that_keras_computes_is_rejected_in_training(rng, special, backend):
    if special == "synchronized" and backend != "tensorflow":
        pytest.skip("Keras synchronizes layers with TensorFlow alone")
    layer = Ours(reproducible=True, **({special: True} if special != "mask" else {}))
    x = rng.normal(size=(6, 7, 5)).astype("f")
    operands = {"mask": np.arange(42).reshape(6, 7) % 3 > 0} if special == "mask" else {}
    layer(x, training=False, **operands)
    with pytest.raises(ArgumentValueError, match=r"reproducible: .*mask, renorm=True or.*got True"):
        layer(x, training=True, **operands)
    layer.trainable = False
    layer(x, training=True, **operands)


def test_reproducible_model_compiled_by_xla_is_rejected(rng, backend):
    if backend != "tensorflow":
        pytest.skip("of formulas for XLA, which TensorFlow alone has")
    x = rng.normal(size=(8, 4)).astype("f")
    made = keras.Sequential([keras.Input((4,)), Ours(reproducible=True)])
    made.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(ArgumentValueError, match=r"reproducible: .*XLA.*jit_compile=False"):
        made.fit(x, x, verbose=0)


class Wrapped(keras.layers.Layer):
    """A layer of whose outputs Keras finds the shape by calling it, without values."""

    def __init__(self):
        super().__init__()
        self.inner = Ours(reproducible=True)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs):
        return self.inner(inputs, training=True)


def test_reproducible_layer_in_wrapper_has_static_output_shape():
    found = Wrapped()(keras.Input((7, 4), batch_size=6))
    assert found.shape == (6, 7, 4)
