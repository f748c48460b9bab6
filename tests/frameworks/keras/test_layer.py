"""The layer beside Keras's own: one step, every option, the same weights."""

from __future__ import annotations

import subprocess
import sys

import keras
import numpy as np
import pytest

from backnorm import ArgumentValueError
from backnorm import keras as ours
from backnorm.keras import layer as module

Theirs = keras.layers.BatchNormalization
Ours = ours.BatchNormalization


@pytest.fixture
def counted(monkeypatch):
    """Count the batches that backnorm normalises."""
    calls = []
    original = module.batch_norm

    def count(*args, **kwargs):
        calls.append(args[0])
        return original(*args, **kwargs)

    monkeypatch.setattr(module, "batch_norm", count)
    return calls


def pair(filled, shape, **options):
    """Return our layer and Keras's with the same weights."""
    own, theirs = filled(Ours(**options), shape), Theirs(**options)
    theirs.build(shape)
    theirs.set_weights(own.get_weights())
    return own, theirs


def weights(layer):
    return [np.asarray(w, np.float64) for w in layer.get_weights()]


OPTIONS = [
    {},
    {"scale": False},
    {"center": False},
    {"scale": False, "center": False},
    {"momentum": 0.5, "epsilon": 0.25},
    {"axis": 1},
    {"axis": 2},
    {"axis": -2},
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [(6, 4, 3, 5), (4, 2, 3, 2, 5)], ids=str)
def test_layer_step_matches_keras(step, filled, close, counted, rng, options, shape):
    x, dy = rng.normal(0.5, 2, (2, *shape)).astype("f")
    own, theirs = pair(filled, shape, **options)
    close(step(own, x, dy), step(theirs, x, dy), 5e-6)
    assert len(counted) == 1
    close(weights(own), weights(theirs), 1e-6)


def test_layer_of_rank_2_in_float64_matches_formula_and_keras(
    step, filled, close, counted, rng, backend
):
    if backend == "jax":
        pytest.skip("JAX has float64 only by a setting of the whole process")
    x, dy = rng.normal(0.5, 2, (2, 30, 5))
    own, theirs = pair(filled, x.shape, dtype="float64")
    gamma, beta, *_ = weights(own)
    y, *gradients = step(own, x, dy)
    expected = gamma * (x - x.mean(0)) / np.sqrt(x.var(0) + own.epsilon) + beta
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-14)
    # With PyTorch, Keras's own layer computes in float32 even then.
    tolerance = 1e-5 if backend == "torch" else 1e-12
    close([y, *gradients], step(theirs, x, dy), tolerance)
    close(weights(own), weights(theirs), tolerance)
    assert {keras.backend.standardize_dtype(v.dtype) for v in own.variables} == {"float64"}
    assert counted


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "bfloat16"])
def test_layer_in_half_precision_does_not_cast_x_and_matches_keras(
    step, filled, close, counted, rng, policy
):
    shape = (6, 4, 3, 5)
    x, dy = rng.normal(0.5, 2, (2, *shape)).astype("f")
    # Keras's layer converts to float32 and the result to 16 bits.
    own, theirs = pair(filled, shape, dtype=policy)
    digits = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[own.compute_dtype]
    close(step(own, x, dy), step(theirs, x, dy), 4 * digits)
    assert [keras.backend.standardize_dtype(t.dtype) for t in counted] == [own.compute_dtype]
    close(weights(own), weights(theirs), 1e-6 if policy.startswith("mixed") else 2 * digits)


def test_layer_without_autocast_computes_in_wider_type(filled, counted, rng):
    x = rng.normal(0.5, 2, (40, 5)).astype("float16")
    own, theirs = pair(filled, x.shape, autocast=False)
    results = [layer(keras.ops.convert_to_tensor(x), training=True) for layer in (own, theirs)]
    assert {keras.backend.standardize_dtype(r.dtype) for r in results} == {"float32"}
    results = [keras.ops.convert_to_numpy(r) for r in results]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)
    assert [keras.backend.standardize_dtype(t.dtype) for t in counted] == ["float32"]


@pytest.mark.parametrize("trainable", [True, False])
@pytest.mark.parametrize("training", [True, False, None])
def test_layer_uses_batch_statistics_only_if_trainable_and_in_training(
    filled, counted, rng, trainable, training
):
    x = rng.normal(0.5, 2, (6, 4, 5)).astype("f")
    own, theirs = pair(filled, x.shape)
    own.trainable = theirs.trainable = trainable
    before = weights(own)
    results = [keras.ops.convert_to_numpy(layer(x, training=training)) for layer in (own, theirs)]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-5)
    moved = bool(trainable and training)
    assert len(counted) == moved
    changed = [not np.array_equal(*two) for two in zip(before, weights(own), strict=True)]
    assert changed == [False, False, moved, moved]


def test_frozen_layer_step_equals_keras(step, filled, close, counted, rng):
    x, dy = rng.normal(0.5, 2, (2, 6, 4, 5)).astype("f")
    own, theirs = pair(filled, x.shape)
    own.trainable = theirs.trainable = False
    close(step(own, x, dy), step(theirs, x, dy), 0)
    assert not counted


def test_layer_with_mask_is_computed_by_keras(filled, counted, rng):
    x = rng.normal(0.5, 2, (6, 4, 5)).astype("f")
    mask = rng.uniform(size=(6, 4)) < 0.5
    own, theirs = pair(filled, x.shape)
    results = [
        keras.ops.convert_to_numpy(layer(x, training=True, mask=keras.ops.convert_to_tensor(mask)))
        for layer in (own, theirs)
    ]
    np.testing.assert_array_equal(*results)
    for one, other in zip(weights(own), weights(theirs), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not counted
    assert own.supports_masking


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padding", [np.nan, np.inf])
def test_layer_gradients_with_nan_outside_of_mask_are_those_of_other_padding(
    step, filled, close, rng, padding, training
):
    x, dy = rng.normal(0.5, 2, (2, 6, 4, 5)).astype("f")
    mask = np.arange(24).reshape(6, 4) % 3 > 0
    dy[~mask] = 0
    start = filled(Ours(), x.shape).get_weights()
    results = []
    for value in (padding, 0.5):
        x[~mask] = value
        layer = Ours()
        layer.build(x.shape)
        layer.set_weights(start)
        options = {"training": training, "mask": keras.ops.convert_to_tensor(mask)}
        results.append((*step(layer, x, dy, **options), *weights(layer)))
    (y, *found), (expected_y, *expected) = results
    close([y[mask], *found], [expected_y[mask], *expected], 0)
    assert np.isnan(y[~mask]).all()


def test_layer_with_mask_of_another_rank_raises_error_of_keras(filled, rng):
    layer = filled(Ours(), (6, 4, 5))
    x = rng.normal(0.5, 2, (6, 4, 5)).astype("f")
    with pytest.raises(ValueError, match="one dimension less"):
        layer(x, training=True, mask=keras.ops.ones((6, 4, 5), "bool"))


@pytest.mark.parametrize("special", ["renorm", "synchronized"])
def test_layer_with_renorm_or_synchronized_is_computed_by_keras(
    special, filled, counted, rng, backend
):
    options = {special: True}
    if special == "synchronized" and backend != "tensorflow":
        with pytest.raises(ValueError, match="synchronized=True"):
            Ours(**options)
        return
    options |= {"renorm_clipping": {"rmax": 1.5}} if special == "renorm" else {}
    x = rng.normal(0.5, 2, (6, 4, 5)).astype("f")
    own, theirs = pair(filled, x.shape, **options)
    results = [keras.ops.convert_to_numpy(layer(x, training=True)) for layer in (own, theirs)]
    np.testing.assert_array_equal(*results)
    assert not counted


REPLICAS = """
import keras
import numpy as np
import tensorflow as tf
from backnorm.keras import BatchNormalization

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
x = np.random.default_rng(0).normal(2, 3, (12, 5)).astype("f")
parts = strategy.experimental_distribute_values_from_function(
    lambda context: tf.constant(np.split(x, [4])[context.replica_id_in_sync_group])
)
for synchronized in (False, True):
    for kind in (BatchNormalization, keras.layers.BatchNormalization):
        with strategy.scope():
            layer = kind(synchronized=synchronized)
            layer.build((None, 5))
        y = strategy.run(tf.function(lambda x: layer(x, training=True)), args=(parts,))
        # The mean of a part's y is 0 with the part's own statistics.
        print(*(float(tf.reduce_mean(each[:, 0])) for each in y.values))
"""


@pytest.mark.long
def test_layer_in_replicas_has_the_statistics_that_keras_has(backend):
    """Those of each replica's part, or with ``synchronized=True`` those of the whole batch."""
    if backend != "tensorflow":
        pytest.skip("replicas are TensorFlow's")
    done = subprocess.run(
        [sys.executable, "-c", REPLICAS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    numbers = np.array(done.stdout.split()[-8:], float).reshape(2, 2, 2)
    np.testing.assert_allclose(numbers[:, 0], numbers[:, 1], atol=1e-6)
    of_parts, of_whole = np.abs(numbers[:, 0])
    assert of_parts.max() < 1e-6
    assert of_whole.min() > 0.01


def test_layer_config_and_variable_names_match_keras():
    options = {
        "axis": 1,
        "momentum": 0.7,
        "epsilon": 0.01,
        "scale": False,
        "beta_initializer": "ones",
        "beta_regularizer": keras.regularizers.L2(0.1),
        "gamma_constraint": keras.constraints.NonNeg(),
        "name": "norm",
        "dtype": "mixed_bfloat16",
    }
    own, theirs = Ours(**options), Theirs(**options)
    assert own.get_config() == theirs.get_config()
    assert Ours.from_config(theirs.get_config()).get_config() == own.get_config()
    assert Theirs.from_config(own.get_config()).get_config() == own.get_config()
    assert isinstance(own, Theirs)
    own.build((None, 3, 4))
    theirs.build((None, 3, 4))
    assert [v.path for v in own.variables] == [v.path for v in theirs.variables]
    # Arguments may come by position, as those of Keras's layer.
    by_position = Ours(1, 0.5, name="norm").get_config()
    assert by_position == Theirs(1, 0.5, name="norm").get_config()
    assert (by_position["axis"], by_position["momentum"]) == (1, 0.5)


@pytest.mark.parametrize("policy", ["float32", "float64", "mixed_bfloat16"])
def test_layer_of_empty_batch_with_unknown_size_returns_nan_where_keras_does(
    filled, rng, backend, policy
):
    if backend != "tensorflow":
        pytest.skip("only TensorFlow traces sizes that are not known")
    import tensorflow as tf

    x = rng.normal(0.5, 2, (6, 3, 4)).astype("f")
    results = []
    for layer in pair(filled, x.shape, dtype=policy):

        @tf.function(input_signature=[tf.TensorSpec([None, 3, 4])])
        def step(x, layer=layer):
            with tf.GradientTape() as tape:
                y = layer(x, training=True)
            sources = [v.value for v in layer.trainable_variables]
            return y, *tape.gradient(y, sources, output_gradients=tf.sin(y))

        full = step(x)
        before = weights(layer)
        results.append((full, before, step(x[:0]), weights(layer)))
    (_, before, own, moved), (_, _, theirs, expected) = results
    assert all(np.isfinite(each).all() for each in before)
    assert [w.dtype for w in own] == [w.dtype for w in theirs]
    for one, other in zip((*own, *moved), (*theirs, *expected), strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
    # The statistics, and the gradient of gamma.
    assert np.isnan(moved[2:]).all()
    assert np.isnan(own[1]).all()


def test_batch_norm_of_torch_rejects_tensor_on_other_device(backend):
    if backend != "torch":
        pytest.skip("only backnorm.torch computes on the CPU alone and cannot move a tensor there")
    import torch

    from backnorm.keras.of_torch import batch_norm

    class Elsewhere:
        device = torch.device("cuda", 0)

    with pytest.raises(ArgumentValueError, match=r"inputs: must be on the CPU.*cuda:0"):
        batch_norm(Elsewhere(), None, None, epsilon=1e-3, axis=1, arithmetic=None)


def test_outputs_have_static_shapes():
    inputs = keras.Input((4, 3, 5))
    assert Ours()(inputs).shape == (None, 4, 3, 5)
    assert Ours().compute_output_shape((None, 7)) == (None, 7)

    class Wrapped(keras.layers.Layer):
        """Has no compute_output_shape: Keras traces its call."""

        def __init__(self):
            super().__init__()
            self.norm = Ours()

        def call(self, inputs, training=None):
            return self.norm(inputs, training=True)

    assert Wrapped()(inputs).shape == (None, 4, 3, 5)
