"""Models of every kind, converted and reverted in place; trained before and after."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from backnorm import ArgumentTypeError
from backnorm.keras import BatchNormalization, ConversionWarning, convert, revert

Theirs = keras.layers.BatchNormalization
SHAPE = (6, 6, 4)


def functional():
    """Return a model with a model in it, and a layer that is used twice."""
    inputs = keras.Input(SHAPE)
    x = Theirs(name="first")(inputs)
    inner = keras.Sequential(
        [keras.Input(SHAPE), Theirs(axis=1, name="inner_norm"), keras.layers.Conv2D(4, 1)],
        name="inner",
    )
    shared = Theirs(scale=False, name="shared")
    x = shared(inner(shared(x)))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x), name="whole")


def several_inputs():
    first, second = keras.Input(SHAPE, name="a"), keras.Input(SHAPE, name="b")
    norm = Theirs(name="shared")
    x = keras.layers.Concatenate()([norm(first), norm(second), Theirs(name="other")(second)])
    outputs = {"whole": keras.layers.Dense(3)(keras.layers.GlobalMaxPooling2D()(x)), "part": x}
    return keras.Model({"a": first, "b": second}, outputs)


class Block(keras.layers.Layer):
    """A layer with layers in attributes, lists, tuples and dictionaries of these."""

    def __init__(self):
        super().__init__()
        self.norms = [Theirs(name="of_list"), (Theirs(name="of_tuple"),)]
        self.table = {"a": Theirs(name="of_dict"), "b": [Theirs(name="of_list_of_dict")]}
        self.again = self.norms[0]

    def call(self, x, training=None):
        x = self.norms[1][0](self.norms[0](x, training=training), training=training)
        x = self.table["b"][0](self.table["a"](x, training=training), training=training)
        return self.again(x, training=training)


class Subclassed(keras.Model):
    """A subclassed model, with layers and models of every kind in it, one made when it is built."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.inner = keras.Sequential([keras.layers.Conv2D(4, 1), Theirs(name="of_sequential")])
        self.head = keras.layers.Dense(3)

    def build(self, shape):
        self.late = Theirs(name="late")
        super().build(shape)

    def call(self, inputs, training=None):
        x = self.late(self.inner(self.block(inputs, training=training)), training=training)
        return self.head(keras.ops.mean(x, axis=(1, 2)))


class Outer(keras.Model):
    """A subclassed model with a subclassed and a functional one in it."""

    def __init__(self):
        super().__init__()
        self.parts = {"one": Subclassed(), "two": functional()}

    def call(self, inputs, training=None):
        one = self.parts["one"](inputs, training=training)
        return one + self.parts["two"](inputs, training=training)


def wrapped():
    inputs = keras.Input(SHAPE)
    x = keras.layers.TimeDistributed(Theirs(name="of_each"))(inputs)
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.GlobalMaxPooling2D()(x)))


BLOCK = {"of_list", "of_tuple", "of_dict", "of_list_of_dict"}
MODELS = {
    functional: {"first", "inner_norm", "shared"},
    Subclassed: {*BLOCK, "of_sequential", "late"},
    Outer: {*BLOCK, "of_sequential", "late", "first", "inner_norm", "shared"},
    wrapped: {"of_each"},
}


def made(kind):
    """Return a model whose weights depend on the seed alone."""
    keras.utils.set_random_seed(0)
    return kind()


def kinds(model):
    return {w.name: type(w) for w in model._flatten_layers() if isinstance(w, Theirs)}


@pytest.fixture
def data(rng):
    """Return a batch and what the models shall make of it."""
    return rng.normal(0.5, 2, (8, *SHAPE)).astype("f"), rng.normal(size=(8, 3)).astype("f")


def compiled(model):
    # Momentum makes the optimizer's state show in the next step. (Adam would make large steps of
    # what is rounding alone: gradients of what another normalisation takes away.)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), "mse")
    return model


def fitted(model, data, epochs=2):
    history = model.fit(*data, batch_size=4, epochs=epochs, shuffle=False, verbose=0)
    return history.history["loss"]


def agree(one, other, tolerance=1e-4):
    for own, theirs in zip(one, other, strict=True):
        scale = max(np.abs(theirs).max(initial=0), 1e-2)
        np.testing.assert_allclose(own, theirs, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    "kind",
    [functional, *(pytest.param(kind, marks=pytest.mark.long) for kind in (Subclassed, wrapped))],
)
def test_converted_and_reverted_model_trains_like_unconverted(kind, data):
    names = MODELS[kind]
    plain, model = compiled(made(kind)), compiled(made(kind))
    expected, own = fitted(plain, data), fitted(model, data)
    agree(own, expected, 1e-6)
    state = [v.numpy() for v in model.optimizer.variables]
    variables = model.variables
    assert convert(model) is model
    assert kinds(model) == dict.fromkeys(names, BatchNormalization)
    assert [a is b for a, b in zip(model.variables, variables, strict=True)]
    agree([v.numpy() for v in model.optimizer.variables], state, 0)
    agree(fitted(model, data), fitted(plain, data))
    assert revert(model) is model
    assert kinds(model) == dict.fromkeys(names, Theirs)
    agree(fitted(model, data), fitted(plain, data))
    agree(model.get_weights(), plain.get_weights(), 1e-3)
    agree([model.predict(data[0], verbose=0)], [plain.predict(data[0], verbose=0)], 1e-3)


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_model_converted_before_build_and_compile_trains_like_unconverted(kind, data):
    plain, model = made(kind), convert(made(kind))
    agree(fitted(compiled(model), data), fitted(compiled(plain), data))
    # What a model makes when it is built is converted when it is there.
    late = {"late"} & MODELS[kind]
    assert kinds(model) == {
        name: Theirs if name in late else BatchNormalization for name in MODELS[kind]
    }
    assert kinds(convert(model)) == dict.fromkeys(MODELS[kind], BatchNormalization)


@pytest.mark.long
def test_fit_after_convert_or_revert_is_traced_again(data, monkeypatch):
    """A graph that Keras traced in an earlier fit calls Keras's layer."""
    from backnorm.keras import layer as module

    calls = []
    original = module.batch_norm
    monkeypatch.setattr(module, "batch_norm", lambda *a, **k: calls.append(1) or original(*a, **k))
    model = compiled(made(functional))
    fitted(model, data, 1)
    assert not calls
    fitted(convert(model), data, 1)
    assert calls
    calls.clear()
    fitted(revert(model), data, 1)
    assert not calls


def test_converted_model_of_several_inputs_and_outputs_matches_keras(data):
    x, _ = data
    inputs = {"a": x, "b": np.sin(x)}
    plain, model = made(several_inputs), convert(made(several_inputs))
    assert kinds(model) == dict.fromkeys(("shared", "other"), BatchNormalization)
    own, theirs = (each(inputs, training=True) for each in (model, plain))
    assert sorted(own) == ["part", "whole"]
    agree(*([keras.ops.convert_to_numpy(y[k]) for k in sorted(y)] for y in (own, theirs)), 1e-5)
    agree(model.get_weights(), plain.get_weights(), 1e-5)


def test_convert_of_single_layer_returns_layer_of_backnorm():
    layer = Theirs(momentum=0.5)
    assert type(convert(layer)) is BatchNormalization
    assert layer.momentum == 0.5
    assert type(revert(layer)) is Theirs


def test_convert_keeps_config_nodes_and_frozen_weights(data):
    model = made(functional)
    model.get_layer("first").trainable = False
    configuration = model.get_layer("first").get_config()
    convert(model)
    assert model.get_layer("first").get_config() == configuration
    assert len(model.get_layer("shared")._inbound_nodes) == 2
    frozen = [w.copy() for w in model.get_layer("first").get_weights()]
    fitted(compiled(model), data)
    agree(model.get_layer("first").get_weights(), frozen, 0)


def test_clone_of_converted_model_is_converted_and_independent(data):
    model = convert(made(functional))
    copy = keras.models.clone_model(model)
    assert kinds(copy) == dict.fromkeys(MODELS[functional], BatchNormalization)
    revert(copy)
    assert kinds(model) == dict.fromkeys(MODELS[functional], BatchNormalization)


class Derived(Theirs):
    """Might do anything."""


def test_convert_and_revert_keep_derived_layers():
    model = keras.Sequential([keras.Input((4,)), Derived(name="derived"), Theirs(name="norm")])
    assert kinds(convert(model)) == {"derived": Derived, "norm": BatchNormalization}
    assert kinds(revert(model)) == {"derived": Derived, "norm": Theirs}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([keras.layers.Dense(3)], r"no layer of keras\.layers\.BatchNormalization$"),
        ([Derived()], r"only of classes derived from it: Derived$"),
    ],
)
def test_convert_without_convertible_layer_warns(layers, message):
    with pytest.warns(ConversionWarning, match=message):
        convert(keras.Sequential([keras.Input((4,)), *layers]))
    with pytest.warns(ConversionWarning, match="it is not built"):
        convert(keras.Sequential([type(each).from_config(each.get_config()) for each in layers]))


def test_convert_and_revert_called_twice_restore_keras_layers():
    model = convert(convert(made(functional)))
    assert kinds(revert(revert(model))) == dict.fromkeys(MODELS[functional], Theirs)


def test_convert_rejects_other_types_than_layers():
    for function in (convert, revert):
        with pytest.raises(ArgumentTypeError, match=r"model: must be a model .*got list"):
            function([Theirs()])
