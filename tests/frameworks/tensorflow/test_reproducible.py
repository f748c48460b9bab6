"""Reproducible sums in replicas and under tapes; refusals; `test_contract` has their bits."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

import backnorm
from backnorm import ArgumentValueError
from backnorm import tensorflow as ours
from tests.support.dtypes import FLOAT32

from .bits import same
from .conftest import REJECTIONS

EPSILON = 1e-3
SHAPE = (12, 9, 7, 6)


def data(dtype, seed=0):
    """Return x, dy, gamma and beta; gamma and beta of x's type, of which float32 is one."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(2, *SHAPE)) * np.linspace(0.5, 3, SHAPE[-1])
    x += np.linspace(-2, 2, len(x)).reshape(-1, 1, 1, 1) + 7.3
    gamma, beta = np.linspace(-1.5, 2, SHAPE[-1]), np.linspace(1, -1, SHAPE[-1])
    return [each.astype(dtype) for each in (x, dy, gamma, beta)]


def step(x, dy, gamma, beta, **options):
    """Return y, dx, mean, variance, dgamma and dbeta."""
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        y, mean, variance = ours.batch_norm(x, gamma, beta, **{"epsilon": EPSILON, **options})
    dx, *of_parameters = tape.gradient(y, [x, gamma, beta], output_gradients=dy)
    return y, dx, mean, variance, *of_parameters


def canonical(x, dy, gamma, beta, **options):
    """Return the same from NumPy's functions."""
    options = {"epsilon": EPSILON, "data_format": "NXC", "reproducible": True, **options}
    y, mean, variance = backnorm.batch_norm_forward(x, gamma, beta, **options)
    dx, dgamma, dbeta = backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)
    return y, dx, mean, variance, dgamma, dbeta


reproducibly = functools.partial(step, reproducible=True)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
def test_replicas_have_bits_of_their_own_parts(traced):
    """Each of two replicas, on a CPU device of its own, normalises with its own statistics."""
    x, dy, *parameters = data(FLOAT32)
    mirrored = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    parts = list(zip(np.split(x, [4]), np.split(dy, [4]), strict=True))
    values = [
        mirrored.experimental_distribute_values_from_function(
            lambda context, k=k: tf.constant(parts[context.replica_id_in_sync_group][k])
        )
        for k in range(2)
    ]

    def call(*large):
        return reproducibly(*large, *map(tf.constant, parameters))

    found = mirrored.run(tf.function(call, autograph=False) if traced else call, args=values)
    for place, part in enumerate(parts):
        own = [np.asarray(value.values[place]) for value in found]
        same(own, canonical(*part, *parameters))


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
