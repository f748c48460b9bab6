"""Training a small network with our layers and with Keras's: the same course."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from backnorm import keras as ours

from .losses import Losses

LAYERS = {"ours": ours.BatchNormalization, "theirs": keras.layers.BatchNormalization}


@pytest.fixture
def images(rng):
    """Return images of ten classes that can be told apart."""
    labels = np.arange(96) % 10
    patterns = rng.normal(size=(10, 8, 8, 3))
    x = patterns[labels] + rng.normal(0.5, 1.0, (96, 8, 8, 3))
    return x.astype("f"), labels


def network(normalization, dtype=None):
    """Return a network with weights that depend on the seeds alone."""

    def seeded(seed):
        return keras.initializers.GlorotUniform(seed=seed)

    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(6, 3, kernel_initializer=seeded(1), use_bias=False)(inputs)
    x = normalization(momentum=0.9, name="first")(x)
    x = keras.layers.ReLU()(x)
    x = keras.layers.Conv2D(8, 3, kernel_initializer=seeded(2), use_bias=False)(x)
    x = normalization(momentum=0.9, name="second")(x)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.ReLU()(x))
    return keras.Model(inputs, keras.layers.Dense(10, kernel_initializer=seeded(3))(x))


def trained(normalization, images, **compile_options):
    model = network(normalization)
    model.compile(
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **compile_options,
    )
    losses = Losses()
    model.fit(*images, batch_size=32, epochs=4, shuffle=False, verbose=0, callbacks=[losses])
    return model, np.array(losses.values)


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"run_eagerly": True}, marks=pytest.mark.long)],
    ids=["compiled", "eager"],
)
def test_fit_matches_keras_at_each_step(images, options, backend):
    if options and backend != "tensorflow":
        pytest.skip("one way of running is enough where it is the same code")
    models, losses = zip(
        *(trained(layer, images, **options) for layer in LAYERS.values()), strict=True
    )
    assert losses[1].shape == (12,)
    assert losses[1][-1] < 0.95 * losses[1][0]
    # Rounding grows with each step, by the learning rate times what the loss is curved.
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
    np.testing.assert_allclose(losses[0][:2], losses[1][:2], rtol=2e-6)
    for name in ("first", "second"):
        for own, other in zip(*(m.get_layer(name).get_weights() for m in models), strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-3 * np.abs(other).max())
    predictions = [m.predict(images[0], verbose=0) for m in models]
    np.testing.assert_allclose(*predictions, rtol=0, atol=1e-3 * np.abs(predictions[1]).max())
    evaluations = [m.evaluate(*images, verbose=0) for m in models]
    np.testing.assert_allclose(*evaluations, rtol=1e-3)


@pytest.mark.parametrize("jit", ["auto", pytest.param(True, marks=pytest.mark.long)])
def test_fit_compiles_as_keras_does(images, backend, jit):
    if (backend, jit) == ("torch", True):
        pytest.skip("torch.compile takes a minute; backnorm.torch has checks of its own")
    (model, losses), (other, expected) = (
        trained(layer, images, jit_compile=jit) for layer in LAYERS.values()
    )
    assert model.jit_compile == other.jit_compile == (jit is True or backend == "jax")
    np.testing.assert_allclose(losses, expected, rtol=1e-4)


@pytest.mark.long
def test_fit_with_xla_trains_layer_built_after_compile(images, backend):
    if backend != "tensorflow":
        pytest.skip("with the others every layer is compiled")

    class Late(keras.Model):
        """Makes its layers when it is built."""

        def build(self, shape):
            self.inner = network(ours.BatchNormalization)

        def call(self, inputs, training=False):
            return self.inner(inputs, training=training)

    model = Late()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=True)
    model.fit(*images, batch_size=32, verbose=0)
    assert model.jit_compile
    assert not np.array_equal(model.inner.get_layer("first").get_weights()[2], np.zeros(6))


def test_fit_leaves_frozen_layer_unchanged(images):
    model = network(ours.BatchNormalization)
    model.get_layer("first").trainable = False
    before = [w.copy() for w in model.get_layer("first").get_weights()]
    moving = model.get_layer("second").get_weights()[2]
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(*images, batch_size=32, verbose=0)
    for one, other in zip(before, model.get_layer("first").get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(moving, model.get_layer("second").get_weights()[2])


@pytest.mark.long
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_fit_in_mixed_precision_matches_keras(images, policy, set_policy):
    set_policy(policy)
    models, results = zip(*(trained(layer, images) for layer in LAYERS.values()), strict=True)
    np.testing.assert_allclose(*results, rtol=0.05)
    scaled = policy == "mixed_float16"
    for model in models:
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == scaled
        types = {w.dtype for w in model.get_layer("first").weights}
        assert (types, model.get_layer("first").compute_dtype) == ({"float32"}, policy[6:])
