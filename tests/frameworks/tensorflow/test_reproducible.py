"""Reproducible sums: the same bits in any order and layout, and however replicas cut a batch."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import backnorm
from backnorm import ArgumentTypeError, ArgumentValueError
from backnorm import tensorflow as ours
from backnorm.tensorflow.operators import batch_norm_synchronised
from tests.support import internals
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from .bits import differ, same
from .conftest import REJECTIONS

EPSILON = 1e-3
SHAPE = (12, 9, 7, 6)
CHANNELS = SHAPE[-1]
TYPES = pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, FLOAT16, BFLOAT16], ids=str)
# Samples of each replica.
PARTS = [(5, 7), (1, 11), (4, 0, 8), (0, 2, 9, 1)]


def data(dtype, seed=0):
    """Return x, dy, gamma and beta; gamma and beta of x's type, of which float32 is one."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, *SHAPE)) * np.linspace(0.5, 3, CHANNELS)
    x += np.linspace(-2, 2, len(x)).reshape(-1, 1, 1, 1) + 7.3
    gamma, beta = np.linspace(-1.5, 2, CHANNELS), np.linspace(1, -1, CHANNELS)
    return [each.astype(dtype) for each in (x, dy, gamma, beta)]


def step(x, dy, gamma, beta, normalise=ours.batch_norm, **options):
    """Return y, dx, mean, variance, dgamma and dbeta."""
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        y, mean, variance = normalise(x, gamma, beta, **{"epsilon": EPSILON, **options})
    dx, *of_parameters = tape.gradient(y, [x, gamma, beta], output_gradients=dy)
    return y, dx, mean, variance, *of_parameters


def canonical(x, dy, gamma, beta, **options):
    """Return the same from NumPy's functions."""
    options = {"epsilon": EPSILON, "data_format": "NXC", "reproducible": True, **options}
    y, mean, variance = backnorm.batch_norm_forward(x, gamma, beta, **options)
    dx, dgamma, dbeta = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)
    return y, dx, mean, variance, dgamma, dbeta


reproducibly = functools.partial(step, reproducible=True)


@TYPES
def test_reproducible_functions_have_bits_of_numpy_functions(run, dtype):
    operands = data(dtype)
    expected = canonical(*operands)
    same(run(reproducibly, *operands), expected)
    x, dy, gamma, _ = operands
    _, dx, mean, variance, *of_parameters = expected
    backward = functools.partial(ours.batch_norm_backward, epsilon=EPSILON, reproducible=True)
    same(run(backward, x, dy, mean, variance, gamma), (dx, *of_parameters))


@pytest.mark.parametrize("arithmetic", ["float32", "float64"])
def test_reproducible_step_with_arithmetic_has_bits_of_numpy_functions(run, arithmetic):
    operands = data(FLOAT32)
    found = run(functools.partial(reproducibly, arithmetic=arithmetic), *operands)
    same(found, canonical(*operands, arithmetic=arithmetic))


@TYPES
def test_reproducible_bits_do_not_depend_on_sample_order_or_layout(run, dtype):
    x, dy, *parameters = data(dtype)
    order = np.random.default_rng(1).permutation(len(x))
    y, dx, *channels = run(reproducibly, x, dy, *parameters)
    mixed = run(reproducibly, x[order], dy[order], *parameters)
    same(mixed, (np.asarray(y)[order], np.asarray(dx)[order], *channels))
    first = [np.moveaxis(each, -1, 1) for each in (x, dy)]
    moved = run(functools.partial(reproducibly, axis=1), *first, *parameters)
    same(moved, (*(np.moveaxis(np.asarray(each), -1, 1) for each in (y, dx)), *channels))
    if dtype == FLOAT64:
        # Other sums have others.
        plain = run(step, x, dy, *parameters)[2:]
        differ(run(step, x[order], dy[order], *parameters)[2:], plain)


def test_reproducible_nonfinite_sums_equal_numpy_functions(run):
    x, dy, *parameters = data(FLOAT32)
    x[3, 1, 2, 0], x[5, 2, 2, 1], dy[0, 0, 0, 2], dy[1, 0, 0, 3] = np.nan, np.inf, -np.inf, np.nan
    same(run(reproducibly, x, dy, *parameters), canonical(x, dy, *parameters))


@functools.cache
def strategy(size):
    # TensorFlow's collectives of a process are of one size.
    return tf.distribute.MirroredStrategy(
        [f"CPU:{place}" for place in range(size)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def in_replicas(parts, operands, traced=True, function=step, **options):
    """Return what each replica finds for its part of a batch."""
    x, dy, *parameters = operands
    mirrored = strategy(len(parts))
    function = functools.partial(function, normalise=batch_norm_synchronised, **options)

    def call(*large):
        if traced:
            # Of shapes that are not known.
            large = (tf.compat.v1.placeholder_with_default(t, [None] * x.ndim) for t in large)
        return function(*large, *map(tf.constant, parameters))

    call = tf.function(call, autograph=False) if traced else call
    cuts = np.cumsum(parts)[:-1]
    each = list(zip(*(np.split(large, cuts) for large in (x, dy)), strict=True))
    values = [
        mirrored.experimental_distribute_values_from_function(
            lambda context, k=k: tf.constant(each[context.replica_id_in_sync_group][k])
        )
        for k in range(2)
    ]
    return [[np.asarray(one) for one in value.values] for value in mirrored.run(call, args=values)]


def joined(found):
    """Return what all replicas have found as one would, gradients of parameters added up."""
    y, dx, mean, variance, *of_parameters = found
    for statistic in (mean, variance):
        same(statistic, statistic[:1] * len(statistic))
    dtype = of_parameters[0][0].dtype
    total = (np.sum(each, 0, "d").astype(dtype) for each in of_parameters)
    return np.concatenate(y), np.concatenate(dx), mean[0], variance[0], *total


@pytest.mark.parametrize("parts", PARTS, ids=str)
def test_replicas_have_bits_of_undivided_batch(parts):
    operands = data(FLOAT64)
    alone = step(*map(tf.constant, operands), reproducible=True)
    found = in_replicas(parts, operands, reproducible=True)
    same(joined(found), alone)
    # Whatever adds them up.
    for each in found[-2:]:
        assert np.abs(each[0]).min() > 0
        assert not np.any(each[1:])
    differ(joined(in_replicas(parts, operands)), step(*map(tf.constant, operands)))


@TYPES
def test_replicas_have_bits_of_numpy_functions(dtype):
    operands = data(dtype)
    same(joined(in_replicas((4, 0, 8), operands, reproducible=True)), canonical(*operands))


@pytest.mark.parametrize(("dtype", "factor"), [(FLOAT32, 1e-41), (FLOAT64, 1e-309)], ids=str)
def test_replicas_keep_subnormal_numbers(dtype, factor):
    x, dy, *parameters = data(dtype)
    # Functions that are compiled run where such numbers are taken for zero.
    for operands in ((x, factor * dy, *parameters), (factor * x, dy, *parameters)):
        operands = [each.astype(dtype) for each in operands]
        found = joined(in_replicas((4, 0, 8), operands, reproducible=True))
        same(found, canonical(*operands))
        assert any(0 < np.abs(each).max() < np.finfo(dtype).tiny for each in found)


def test_replicas_in_eager_mode_have_bits_of_numpy_functions():
    operands = data(FLOAT32)
    found = in_replicas((0, 2, 9, 1), operands, traced=False, reproducible=True)
    same(joined(found), canonical(*operands))


def test_replicas_with_nonfinite_sums_equal_numpy_functions():
    operands = data(FLOAT32)
    x, dy, *_ = operands
    x[3, 1, 2, 0], x[5, 2, 2, 1], dy[0, 0, 0, 2], dy[11, 0, 0, 2] = np.nan, np.inf, np.inf, -np.inf
    same(joined(in_replicas((5, 7), operands, reproducible=True)), canonical(*operands))


def test_replicas_of_empty_batch_equal_numpy_functions():
    x, dy, *parameters = data(FLOAT32)
    operands = x[:0], dy[:0], *parameters
    same(joined(in_replicas((0, 0), operands, reproducible=True)), canonical(*operands))


@pytest.mark.parametrize(("dtype", "rows"), [(FLOAT64, 10), (BFLOAT16, 8)], ids=str)
def test_replicas_exchange_bins_once_per_pass(dtype, rows, monkeypatch):
    messages = internals.messages_of_replicas(monkeypatch)
    in_replicas((4, 0, 8), data(dtype), traced=False, reproducible=True)
    # By each of three, forth and back.
    assert messages == [(tf.int64, 3 * (rows * CHANNELS + 1))] * 6


def squared(*operands, **options):
    """Return the gradient of dx squared."""
    x, *_ = operands
    with tf.GradientTape() as tape:
        tape.watch(x)
        _, dx, *_ = reproducibly(*operands, **options)
    return [tape.gradient(dx, x, output_gradients=dx)]


def test_reproducible_second_derivative_raises(run):
    with pytest.raises(REJECTIONS, match=r"reproducible sums is differentiable once, not twice"):
        run(squared, *data(FLOAT32))
    with pytest.raises(REJECTIONS, match=r"over several replicas is differentiable once"):
        in_replicas((5, 7), data(FLOAT32), function=squared)


def test_reproducible_step_under_tape_that_watches_x_is_that_without(run):
    expected = run(reproducibly, *data(FLOAT32))

    def watched(x, *rest):
        with tf.GradientTape() as tape:
            tape.watch(x)
            return tf.function(reproducibly)(x, *rest)

    same(run(watched, *data(FLOAT32)), expected)


NO_SUMS = r"^reproducible: must be False in forward mode.*XLA.*got True"


def test_reproducible_forward_mode_raises(run):
    def forward_mode(function, x, *others):
        with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
            return function(x, *others)

    operands = data(FLOAT32)
    x, dy, gamma, _ = operands
    backward = functools.partial(ours.batch_norm_backward, epsilon=EPSILON, reproducible=True)
    for function, tensors in ((reproducibly, operands), (backward, (x, dy, gamma, gamma, gamma))):
        with pytest.raises(ArgumentValueError, match=NO_SUMS):
            run(functools.partial(forward_mode, function), *tensors)


def test_reproducible_sums_in_xla_raise():
    operands = list(map(tf.constant, data(FLOAT32)))
    inner = tf.function(lambda *tensors: reproducibly(*tensors))
    for function in (reproducibly, inner):
        compiled = tf.function(lambda *tensors, call=function: call(*tensors), jit_compile=True)
        with pytest.raises(ArgumentValueError, match=NO_SUMS):
            compiled(*operands)

    def in_each():
        return batch_norm_synchronised(operands[0], epsilon=EPSILON, reproducible=True)

    with pytest.raises(ArgumentValueError, match=NO_SUMS):
        strategy(2).run(tf.function(in_each, autograph=False, jit_compile=True))


@pytest.mark.parametrize("normalise", [ours.batch_norm, batch_norm_synchronised])
def test_reproducible_rejects_other_types_than_bool(run, normalise):
    for value in ("yes", 1, None):
        with pytest.raises(ArgumentTypeError, match=r"^reproducible: must be a boolean"):
            run(functools.partial(normalise, epsilon=EPSILON, reproducible=value), np.ones((3, 2)))
