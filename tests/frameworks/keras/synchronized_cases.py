"""Replicas of a strategy that normalise a batch together, in a process of their own.

``python -m ...synchronized_cases SIZE OUT`` runs everything that SIZE replicas do here, each on a
logical CPU; what comes of it goes to the file OUT. TensorFlow fixes its devices when it starts, and
the collectives of a process are of one size. With ``INDEX PORT PORT`` behind it is one of two
workers. `test_synchronized` judges what has come.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
import tensorflow as tf

from backnorm.keras import BatchNormalization, convert
from backnorm.keras import layer as module
from backnorm.tensorflow import synchronised
from backnorm.tensorflow.operators import batch_norm_synchronised
from tests.support import internals

from .losses import Losses

Theirs = keras.layers.BatchNormalization
CHANNELS = 5
EPSILON = 1e-3


class Case(NamedTuple):
    """A batch that lies in parts: how many samples each replica has."""

    parts: tuple[int, ...]
    policy: str = "float32"
    axis: int = -1
    space: tuple[int, ...] = (4, 3)
    offset: float = 0.5
    affine: bool = True
    arithmetic: str | None = None
    reproducible: bool = False

    @property
    def dtype(self):
        return tf.as_dtype(self.policy.removeprefix("mixed_")).as_numpy_dtype

    @property
    def data_format(self):
        return "NXC" if self.axis == -1 else "NCX"

    def data(self):
        """Return x and dy of the whole batch."""
        rng = np.random.default_rng(sum(self.parts))
        shape = (2, sum(self.parts), *self.space, CHANNELS)
        x, dy = rng.normal(size=shape) * np.linspace(0.5, 3, CHANNELS)
        # Parts of different means.
        x += np.linspace(-2, 2, x.shape[0]).reshape(-1, *[1] * (x.ndim - 1)) + self.offset
        return [np.moveaxis(each, -1, self.axis).astype(self.dtype) for each in (x, dy)]

    def cut(self, array):
        return np.split(array, np.cumsum(self.parts)[:-1])

    def layer(self, kind=BatchNormalization, **options):
        """Return a layer whose moving statistics become those of the batch."""
        if kind is BatchNormalization:
            options |= {"arithmetic": self.arithmetic, "reproducible": self.reproducible}
        layer = kind(
            axis=self.axis, momentum=0.0, epsilon=EPSILON, center=self.affine, scale=self.affine,
            dtype=self.policy, **{"synchronized": True, **options},
        )  # fmt: skip
        layer.build(np.moveaxis(np.empty((1, *self.space, CHANNELS)), -1, self.axis).shape)
        if self.affine:
            layer.gamma.assign(np.linspace(-1.5, 2, CHANNELS))
            layer.beta.assign(np.linspace(1, -1, CHANNELS))
        return layer


CASES = {
    "even": Case((4, 4)),
    "uneven": Case((1, 11)),
    "three, one of them empty": Case((4, 0, 7)),
    "empty first": Case((0, 9)),
    "channels first": Case((5, 3), axis=1),
    "rank 2": Case((7, 4), space=()),
    "far from zero": Case((6, 5), offset=1e4),
    "no parameters": Case((4, 3), affine=False),
    "float64": Case((4, 3), "float64"),
    "bfloat16": Case((4, 3), "mixed_bfloat16"),
    "float16": Case((4, 3), "mixed_float16", axis=1),
    "float32 arithmetic": Case((4, 3), arithmetic="float32"),
    "reproducible": Case((1, 11), reproducible=True),
    "reproducible, bfloat16": Case((5, 2), "mixed_bfloat16", axis=1, reproducible=True),
    "reproducible, one of three empty": Case((4, 0, 7), "float64", reproducible=True),
}


@functools.cache
def strategy(size):
    return tf.distribute.MirroredStrategy([f"CPU:{place}" for place in range(size)])


def spread(parts):
    """Return one value of each replica as what a strategy runs a function on."""
    return strategy(len(parts)).experimental_distribute_values_from_function(
        lambda context: tf.constant(parts[context.replica_id_in_sync_group])
    )


def everywhere(value):
    """Return what each replica has of a value."""
    return [np.asarray(each) for each in value.values]


def gradients(layer, x, dy):
    """Return y, dx and the gradients of the parameters."""
    sources = [x, *(v.value for v in layer.trainable_variables)]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True)
    return [y, *tape.gradient(y, sources, output_gradients=dy)]


def in_replicas(case, kind=BatchNormalization, traced=True, **options):
    """Return what comes of a step: y, dx, parts of dgamma and dbeta, mean and variance."""
    mirrored = strategy(len(case.parts))
    with mirrored.scope():
        layer = case.layer(kind, **options)
    step = functools.partial(gradients, layer)
    function = tf.function(lambda *operands: step(*operands), autograph=False) if traced else step
    x, dy = map(case.cut, case.data())
    y, dx, *channels = map(everywhere, mirrored.run(function, args=(spread(x), spread(dy))))
    moved = [everywhere(v.value) for v in (layer.moving_mean, layer.moving_variance)]
    return np.concatenate(y), np.concatenate(dx), channels, moved


def mutated(mutant):
    """Return what comes of the uneven case with something that is wrong."""

    def moments(mean, variance, x, replica):
        count = tf.cast(tf.size(x) / tf.size(mean), tf.float64)
        both = tf.stack([mean, variance])
        if mutant == "mean of means":
            both = replica.all_reduce(tf.distribute.ReduceOp.MEAN, both)
        return *tf.unstack(both), replica.all_reduce(tf.distribute.ReduceOp.SUM, count)

    wrong = {"sums_of_all": lambda *operands: operands[:2]}
    wrong = wrong if mutant == "local sums" else {"moments_of_all": moments}
    with mock.patch.multiple(synchronised, **wrong):
        return in_replicas(CASES["uneven"], traced=False)


MUTANTS = ["local moments", "mean of means", "local sums"]


def messages():
    """Return the sizes of what is exchanged in a step."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        messages = internals.messages_of_replicas(monkeypatch)
        in_replicas(CASES["even"], traced=False)
    return [size for _, size in messages]


def whole_at_once():
    """Return y and the moving mean of a layer that is called outside of `run`."""
    with strategy(2).scope():
        layer = CASES["even"].layer()
        y = layer(CASES["even"].data()[0], training=True)
    return np.asarray(y), everywhere(layer.moving_mean.value)


#: The last batch is one sample for each of two replicas, or one for the first.
SIZES = (6, 5)


def batches(size):
    """Return y and the moving mean after batches of 4, whose size no graph knows."""
    case = CASES["even"]
    with strategy(2).scope():
        layer = case.layer()
    whole = tf.data.Dataset.from_tensor_slices(tuple(each[:size] for each in case.data()))
    step = tf.function(functools.partial(gradients, layer), autograph=False, reduce_retracing=True)
    found = []
    for batch in strategy(2).experimental_distribute_dataset(whole.batch(4)):
        found += everywhere(strategy(2).run(step, args=batch)[0])
    return np.concatenate(found), everywhere(layer.moving_mean.value)


def said_of(function, *arrays):
    """Return the class and the text of what a function raises in replicas."""
    case = CASES["even"]
    try:
        strategy(2).run(function, args=[spread(case.cut(each)) for each in arrays])
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__], str(error)


def twice(traced):
    """Return what is said of a second derivative."""
    with strategy(2).scope():
        layer = CASES["even"].layer()

    def step(x, dy):
        with tf.GradientTape() as outer:
            outer.watch(x)
            _, dx, *_ = gradients(layer, x, dy)
        return outer.gradient(dx, x)

    return said_of(tf.function(step, autograph=False) if traced else step, *CASES["even"].data())


def forward_mode():
    """Return what is said of forward mode."""

    def step(x):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
            return batch_norm_synchronised(x, epsilon=EPSILON)

    return said_of(step, CASES["even"].data()[0])


def two_orders(normalise, x, dy):
    """Return y, dx, the gradient of its squares, dgamma, mean and variance."""
    gamma, beta = (tf.linspace(start, -1.0, CHANNELS) for start in (2.0, 1.0))
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch([x, gamma])
            y, mean, variance = normalise(x, gamma, beta, epsilon=EPSILON)
        dx, dgamma = tape.gradient(y, [x, gamma], output_gradients=dy)
        square = tf.reduce_sum(dx * dx * dy)
    return y, dx, outer.gradient(square, x), dgamma, mean, variance


def compiled():
    """Return what XLA makes of two orders in two replicas.

    On CPUs it compiles replicas together, and takes no variable of the second's device, of which
    TensorFlow's collectives have one.
    """
    parts = list(zip(*map(CASES["uneven"].cut, CASES["uneven"].data()), strict=True))

    def step():
        place = tf.distribute.get_replica_context().replica_id_in_sync_group
        operands = map(tf.constant, parts[int(tf.get_static_value(place))])
        return two_orders(batch_norm_synchronised, *operands)

    mirrored = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    found = mirrored.run(tf.function(step, autograph=False, jit_compile=True))
    return [everywhere(each) for each in found]


def fitted(where, synchronized=True, kind=BatchNormalization, policy="float32", **options):
    """Return the losses of some steps, and the weights after them."""
    rng = np.random.default_rng(0)
    x = rng.normal(0.5, 1.0, (48, 6, 6, 3)).astype("f") + np.linspace(-2, 2, 48).reshape(
        -1, 1, 1, 1
    )
    y = np.arange(48) % 4
    with where.scope():
        inputs = keras.Input((6, 6, 3))
        seeds = [keras.initializers.GlorotUniform(seed=seed) for seed in (1, 2)]
        made = keras.layers.Conv2D(4, 3, kernel_initializer=seeds[0], dtype=policy)(inputs)
        made = kind(momentum=0.9, synchronized=synchronized, dtype=policy)(made)
        made = keras.layers.Flatten(dtype=policy)(keras.layers.ReLU(dtype=policy)(made))
        made = keras.layers.Dense(4, kernel_initializer=seeds[1], dtype="float32")(made)
        model = keras.Model(inputs, made)
        if kind is Theirs:
            convert(model)
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            **options,
        )
    losses = Losses()
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[losses])
    with where.scope():
        return np.array(losses.values), [np.asarray(w) for w in model.get_weights()]


def converted():
    """Return what comes of a model of Keras's layers, and how often ours were called."""
    calls = []
    original = module.batch_norm_synchronised

    def count(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    with mock.patch.object(module, "batch_norm_synchronised", count):
        return *fitted(strategy(2), kind=Theirs), len(calls)


FITS = {"eagerly": {"run_eagerly": True}, "bfloat16": {"policy": "mixed_bfloat16"}}


def of_two():
    """Return what each thing that two replicas do is called, and a function that does it."""
    yield from ((f"mutant {each}", functools.partial(mutated, each)) for each in MUTANTS)
    yield "not synchronized", lambda: in_replicas(CASES["uneven"], synchronized=False)
    yield "theirs", lambda: in_replicas(CASES["uneven"], Theirs)
    for name, kind in (("ours", BatchNormalization), ("theirs", Theirs)):
        yield f"nothing, {name}", functools.partial(in_replicas, Case((0, 0)), kind)
    yield "messages", messages
    yield "whole at once", whole_at_once
    yield from ((f"batches {size}", functools.partial(batches, size)) for size in SIZES)
    # What raises, last.
    yield "twice, eager", lambda: twice(traced=False)
    yield "twice, graph", lambda: twice(traced=True)
    yield "forward mode", forward_mode


def trained_by_two():
    """Return the same of what takes long: models, and XLA."""
    yield "fit", converted
    yield "fit, not synchronized", lambda: fitted(strategy(2), synchronized=False)
    for name, options in FITS.items():
        yield f"fit {name}", functools.partial(fitted, strategy(2), **options)
    yield "XLA", compiled


def of_worker(index, ports):
    """Return what comes of a step in one of several processes, in a loop of their own."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}}
    )
    workers = tf.distribute.MultiWorkerMirroredStrategy()
    case = CASES["uneven"]
    with workers.scope():
        layer = case.layer()
    operands = [tf.constant(case.cut(each)[index]) for each in case.data()]
    step = tf.function(functools.partial(gradients, layer), autograph=False)
    found = [np.asarray(each) for each in workers.run(step, args=operands)]
    return *found, *(np.asarray(v.value) for v in (layer.moving_mean, layer.moving_variance))


def main(size, out, trains=False):
    """Run what `size` replicas do, or the models that two of them train."""
    devices = [tf.config.LogicalDeviceConfiguration()] * size
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
    if trains:
        out.write_bytes(pickle.dumps({name: function() for name, function in trained_by_two()}))
        return
    found = {}
    for name, case in CASES.items():
        if len(case.parts) == size:
            for traced in (False, True):
                found[name, traced] = in_replicas(case, traced=traced)
    if size == 2:
        found |= {name: function() for name, function in of_two()}
    out.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    of_size, to, *worker = sys.argv[1:]
    if worker == ["trains"]:
        main(int(of_size), Path(to), trains=True)
    elif worker:
        Path(to).write_bytes(pickle.dumps(of_worker(int(worker[0]), worker[1:])))
    else:
        main(int(of_size), Path(to))
