"""What a training step computes elements in: of a layer, of a model, in files."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import backnorm
from backnorm import ArgumentTypeError, ArgumentValueError
from backnorm import keras as ours

Ours = ours.BatchNormalization
Theirs = keras.layers.BatchNormalization
BOTH = ("float32", "float64")
OTHER = {"float32": "float64", "float64": "float32"}
ARITHMETICS = pytest.mark.parametrize("arithmetic", BOTH)
SHAPE = (6, 14, 13, 5)


def canonical(layer, x, dy, arithmetic):
    """Return y and the gradients of a layer from NumPy's functions."""
    options = {"epsilon": layer.epsilon, "data_format": "NXC", "arithmetic": arithmetic}
    gamma, beta = (keras.ops.convert_to_numpy(v) for v in (layer.gamma, layer.beta))
    y, mean, variance = backnorm.batch_norm_forward(x, gamma, beta, **options)
    return y, *backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)


def same(found, expected):
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other, strict=True)


@ARITHMETICS
def test_layer_step_with_arithmetic_has_the_bits_of_numpy_functions(step, filled, rng, arithmetic):
    x, dy = rng.normal(20, 2, (2, *SHAPE)).astype("f")
    layer = filled(Ours(arithmetic=arithmetic), SHAPE)
    expected = canonical(layer, x, dy, arithmetic)
    same(step(layer, x, dy), expected)
    with backnorm.arithmetic(OTHER[arithmetic]):
        # The layer's own has precedence.
        same(step(layer, x, dy), expected)
    other = filled(Ours(arithmetic=OTHER[arithmetic]), SHAPE)
    other.set_weights(layer.get_weights())
    assert any((a != b).any() for a, b in zip(step(other, x, dy), expected, strict=True))
    silent = filled(Ours(), SHAPE)
    silent.set_weights(layer.get_weights())
    with backnorm.arithmetic(arithmetic):
        same(step(silent, x, dy), expected)
    same(step(silent, x, dy), canonical(silent, x, dy, None))


@ARITHMETICS
def test_config_contains_arithmetic_only_if_given(arithmetic):
    layer = Ours(arithmetic=arithmetic)
    config = layer.get_config()
    assert config.pop("arithmetic") == arithmetic == layer.arithmetic
    assert config == Theirs(name=layer.name).get_config()
    assert Ours.from_config(layer.get_config()).arithmetic == arithmetic
    # Whoever has not the layer reads what it does not say.
    silent = Ours()
    assert silent.get_config() == Theirs(name=silent.name).get_config()
    assert Theirs.from_config(silent.get_config()).name == silent.name


def model():
    inputs = keras.Input((8, 8, 3))
    x = Theirs(name="first")(keras.layers.Conv2D(4, 3, name="conv")(inputs))
    inner = keras.Sequential([keras.Input((6, 6, 4)), Theirs(name="inner")], name="block")
    return keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(inner(x)))


def arithmetics(model):
    return [each.arithmetic for each in model._flatten_layers() if type(each) is Ours]


def test_convert_sets_arithmetic_and_revert_removes_it():
    made = model()
    assert ours.convert(made, arithmetic="float32") is made
    assert arithmetics(made) == ["float32"] * 2
    # Those that were converted before keep theirs, unless another is asked for.
    ours.convert(made)
    assert arithmetics(made) == ["float32"] * 2
    ours.convert(made, arithmetic="float64")
    assert arithmetics(made) == ["float64"] * 2
    ours.revert(made)
    layers = [each for each in made._flatten_layers() if type(each) is Theirs]
    assert len(layers) == 2
    assert not any(hasattr(each, "arithmetic") for each in layers)
    ours.convert(made)
    assert arithmetics(made) == [None] * 2


def test_saved_and_cloned_models_keep_arithmetic(tmp_path):
    made = ours.convert(model(), arithmetic="float32")
    path = tmp_path / "model.keras"
    made.save(path)
    assert arithmetics(keras.models.load_model(path)) == ["float32"] * 2
    assert arithmetics(keras.models.clone_model(made)) == ["float32"] * 2
    ours.revert(made).save(path)
    assert arithmetics(keras.models.load_model(path)) == []


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

    results = [trained(arithmetic) for arithmetic in ("float64", "float32", "float64")]
    same(results[0], results[2])
    assert any((a != b).any() for a, b in zip(*results[:2], strict=True))


@pytest.mark.parametrize(
    "call", [Ours, lambda arithmetic: ours.convert(model(), arithmetic=arithmetic)]
)
def test_layer_and_convert_reject_bad_arithmetic(call):
    known = r"^arithmetic: unknown; got 'float16'; expected 'float32' or 'float64'"
    with pytest.raises(ArgumentValueError, match=known):
        call(arithmetic="float16")
    with pytest.raises(ArgumentTypeError, match=r"^arithmetic: must be a string"):
        call(arithmetic=np.float32)


def test_convert_with_bad_arithmetic_leaves_model_unchanged():
    made = model()
    with pytest.raises(ArgumentValueError, match=r"^arithmetic: unknown"):
        ours.convert(made, arithmetic="single")
    assert arithmetics(made) == []


def test_float64_layer_rejects_float32_arithmetic_except_from_block(step, filled, rng, backend):
    if backend == "jax":
        pytest.skip("JAX has float64 only by a setting of the whole process")
    x, dy = rng.normal(20, 2, (2, *SHAPE))
    with pytest.raises(ArgumentValueError, match=r"arithmetic: float64 elements are computed"):
        step(filled(Ours(arithmetic="float32", dtype="float64"), SHAPE), x, dy)
    with backnorm.arithmetic("float32"):
        step(filled(Ours(dtype="float64"), SHAPE), x, dy)
