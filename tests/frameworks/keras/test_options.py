"""The options of ours in configurations, files and conversions; `test_contract` has their bits."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from backnorm import ArgumentTypeError, ArgumentValueError
from backnorm import keras as ours

Ours = ours.BatchNormalization
Theirs = keras.layers.BatchNormalization
#: Of each option two values, and the default.
OPTIONS = {"arithmetic": ("float32", "float64", None), "reproducible": (True, False, False)}
BY_OPTION = pytest.mark.parametrize("option", OPTIONS)


def model():
    inputs = keras.Input((8, 8, 3))
    x = Theirs(name="first")(keras.layers.Conv2D(4, 3, name="conv")(inputs))
    inner = keras.Sequential([keras.Input((6, 6, 4)), Theirs(name="inner")], name="block")
    return keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(inner(x)))


def values(model, option):
    return [getattr(each, option) for each in model._flatten_layers() if type(each) is Ours]


@BY_OPTION
def test_config_contains_option_only_if_given(option):
    value, _, default = OPTIONS[option]
    layer = Ours(**{option: value})
    config = layer.get_config()
    assert config.pop(option) == value == getattr(layer, option)
    assert config == Theirs(name=layer.name).get_config()
    assert getattr(Ours.from_config(layer.get_config()), option) == value
    # Whoever has not the layer reads what it does not say.
    silent = Ours()
    assert getattr(silent, option) is default
    assert silent.get_config() == Theirs(name=silent.name).get_config()
    assert Theirs.from_config(silent.get_config()).name == silent.name


@BY_OPTION
def test_convert_sets_option_files_keep_it_and_revert_removes_it(option, tmp_path):
    value, other, default = OPTIONS[option]
    made, path = model(), tmp_path / "model.keras"
    assert ours.convert(made, **{option: value}) is made
    assert values(made, option) == [value] * 2
    # Those that were converted before keep theirs, unless another is asked for.
    ours.convert(made)
    assert values(made, option) == [value] * 2
    made.save(path)
    assert values(keras.models.load_model(path), option) == [value] * 2
    assert values(keras.models.clone_model(made), option) == [value] * 2
    ours.convert(made, **{option: other})
    assert values(made, option) == [other] * 2
    ours.revert(made).save(path)
    assert values(keras.models.load_model(path), option) == []
    layers = [each for each in made._flatten_layers() if type(each) is Theirs]
    assert len(layers) == 2
    assert not any(hasattr(each, option) for each in layers)
    ours.convert(made)
    assert values(made, option) == [default] * 2


def test_fit_after_convert_with_other_arithmetic_uses_it(rng):
    made = ours.convert(model(), arithmetic="float64")
    x, target = rng.normal(20, 2, (8, 8, 8, 3)).astype("f"), rng.normal(size=(8, 4)).astype("f")
    made.compile("sgd", "mse")
    before = made.get_weights()

    def trained(arithmetic):
        ours.convert(made, arithmetic=arithmetic)
        made.set_weights(before)
        made.fit(x, target, batch_size=8, epochs=1, verbose=0, shuffle=False)
        return made.get_weights()

    first, other, again = (trained(each) for each in ("float64", "float32", "float64"))
    assert all(map(np.array_equal, first, again))
    assert not all(map(np.array_equal, first, other))


@pytest.mark.parametrize("call", [Ours, lambda **options: ours.convert(model(), **options)])
def test_layer_and_convert_reject_bad_option(call):
    known = r"^arithmetic: unknown; got 'float16'; expected 'float32' or 'float64'"
    with pytest.raises(ArgumentValueError, match=known):
        call(arithmetic="float16")
    with pytest.raises(ArgumentTypeError, match=r"^arithmetic: must be a string"):
        call(arithmetic=np.float32)
    for value in ("yes", 1):
        with pytest.raises(ArgumentTypeError, match=r"^reproducible: must be a boolean"):
            call(reproducible=value)


def test_convert_with_bad_arithmetic_leaves_model_unchanged():
    made = model()
    with pytest.raises(ArgumentValueError, match=r"^arithmetic: unknown"):
        ours.convert(made, arithmetic="single")
    assert values(made, "arithmetic") == []


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
