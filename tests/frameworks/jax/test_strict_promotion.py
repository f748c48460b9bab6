"""``jax_numpy_dtype_promotion="strict"``: what documents mixed types takes them there, too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from backnorm.jax import (
    RunningStatistics,
    batch_norm,
    batch_norm_inference,
    batch_norm_with_state,
)
from backnorm.jax.linen import BatchNorm as OfLinen
from backnorm.jax.nnx import BatchNorm as OfNnx
from tests.support.dtypes import ELEMENT_TYPES

HOW = {"epsilon": 1e-3, "axis": 1}


def assert_same_when_strict(function, *arguments):
    """Assert that a function returns the same bits under strict promotion."""
    expected = function(*arguments)
    with jax.numpy_dtype_promotion("strict"):
        found = function(*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), strict=True)


@pytest.fixture(params=ELEMENT_TYPES, ids=str)
def x(request, normal):
    return normal(6, 5, 4).astype(request.param)


@pytest.mark.covering(1)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kept", ELEMENT_TYPES, ids=str)
def test_batch_norm_with_state_under_strict_promotion_has_the_same_bits(x, kept, training):
    state = RunningStatistics.start(5, kept)

    def step(x):
        return batch_norm_with_state(x, state, training=training, **HOW)

    assert_same_when_strict(step, x)


@pytest.mark.covering(1)
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32], ids=str)
@pytest.mark.parametrize("library", ["linen", "nnx"])
def test_layers_under_strict_promotion_have_the_same_bits_where_flax_runs(
    x, library, dtype, frozen
):
    options = {"use_running_average": frozen, "dtype": dtype}

    def step(kind):
        if library == "linen":
            layer = kind(**options)
            variables = layer.init(jax.random.key(0), x)
            return lambda: layer.apply(variables, x, mutable=["batch_stats"])
        layer = kind(4, **options, rngs=nnx.Rngs(0))
        return lambda: (layer(x), nnx.state(layer))

    ours, theirs = (OfLinen, linen.BatchNorm) if library == "linen" else (OfNnx, nnx.BatchNorm)
    try:
        with jax.numpy_dtype_promotion("strict"):
            step(theirs)()
    except jax.dtypes.TypePromotionError:
        return
    assert_same_when_strict(lambda: step(ours)())


@pytest.mark.long
def test_functions_and_derivatives_under_strict_promotion_have_the_same_bits(x):
    gamma, beta = jnp.linspace(0.5, 2.0, 5), jnp.linspace(-1.0, 1.0, 5)
    channel = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    gamma, beta = gamma.astype(channel), beta.astype(channel)
    mask = jnp.arange(6)[:, None, None] < 4

    def loss(x, gamma, **more):
        y = batch_norm(x, gamma, beta, **HOW, **more)[0]
        return jnp.sum(jnp.sin(y.astype(channel)))

    def mapped(x):
        norm = jax.vmap(lambda x: batch_norm(x, gamma, beta, **HOW, axis_name="d"), axis_name="d")
        return norm(jnp.stack([x, x * 2]))

    def second(x):
        return jax.grad(lambda g: jnp.sum(jax.grad(loss)(x, g).astype(channel) ** 2))(gamma)

    for function in (
        lambda x: batch_norm(x, gamma, beta, **HOW, mask=mask),
        lambda x: batch_norm(x, gamma, beta, **HOW, activation="relu", residual=x),
        lambda x: batch_norm(x, gamma, beta, **HOW, activation="relu6", residual=x),
        lambda x: batch_norm(x, gamma, beta, **HOW, activation="silu"),
        lambda x: batch_norm_inference(x, beta, gamma, gamma, beta, **HOW),
        lambda x: jax.grad(loss, (0, 1))(x, gamma),
        lambda x: jax.grad(lambda x: loss(x, gamma, mask=mask))(x),
        lambda x: jax.grad(lambda x: loss(x, gamma, reproducible=True))(x),
        lambda x: jax.jvp(lambda x: loss(x, gamma), (x,), (x,)),
        second,
        mapped,
    ):
        assert_same_when_strict(function, x)
