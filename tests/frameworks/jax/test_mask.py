"""Elements outside of a mask: their values change no derivative in the other elements."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from backnorm.jax import RunningStatistics, batch_norm, batch_norm_with_state, linen
from backnorm.jax.nnx import BatchNorm

from .conftest import EPSILON, agree

SHAPE, CHANNELS = (4, 5, 3), 3
MASK = jnp.ones((4, 5, 1), bool).at[0, 0].set(False).at[2, 3:].set(False)

# flax's layer keeps statistics of float64 in float32 by the way that JAX warns of.
pytestmark = pytest.mark.filterwarnings("ignore:scatter inputs have incompatible:FutureWarning")


def of_function(x, gamma, beta, **options):
    return batch_norm(x, gamma, beta, epsilon=EPSILON, mask=MASK, **options)[0]


def of_parts(x, gamma, beta):
    def of_part(x, mask):
        return batch_norm(x, gamma, beta, epsilon=EPSILON, mask=mask, axis_name="part")[0]

    return jax.vmap(of_part, axis_name="part")(x, MASK)


def of_state(x, gamma, beta, training):
    state, options = RunningStatistics.start(CHANNELS), {"epsilon": EPSILON, "training": training}
    return batch_norm_with_state(x, state, gamma, beta, mask=MASK, **options)[0]


def of_linen(x, gamma, beta, frozen):
    layer = linen.BatchNorm(use_running_average=frozen)
    statistics = {"mean": jnp.zeros(CHANNELS), "var": jnp.ones(CHANNELS)}
    variables = {"params": {"scale": gamma, "bias": beta}, "batch_stats": statistics}
    return layer.apply(variables, x, mask=MASK, mutable=["batch_stats"])[0]


def of_nnx(x, gamma, beta, frozen):
    layer = BatchNorm(CHANNELS, use_running_average=frozen, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = gamma, beta
    return layer(x, mask=MASK)


CALLS = {
    "function": of_function,
    "silu": partial(of_function, activation="silu"),
    "residual": partial(of_function, activation="relu", residual=jnp.ones(SHAPE)),
    "parts": of_parts,
    "state-training": partial(of_state, training=True),
    "state-frozen": partial(of_state, training=False),
    "linen-training": partial(of_linen, frozen=False),
    "linen-frozen": partial(of_linen, frozen=True),
    "nnx-training": partial(of_nnx, frozen=False),
    "nnx-frozen": partial(of_nnx, frozen=True),
}


# The other layers call the same functions as those of linen.
RARE = {name for name in CALLS if name.startswith(("state", "nnx"))}


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(call, id=name, marks=[pytest.mark.long] * (name in RARE))
        for name, call in CALLS.items()
    ],
)
def test_derivatives_with_nan_outside_of_mask_are_those_of_other_padding(call, layer, normal):
    x, *parameters = layer(SHAPE, -1)
    tangents, weights = (normal(*SHAPE), normal(CHANNELS), normal(CHANNELS)), normal(*SHAPE)

    def loss(*operands):
        return jnp.sum(jnp.sin(jnp.where(MASK, call(*operands), 0)) * weights)

    gradient = jax.grad(loss, (0, 1, 2))

    def second(*operands):
        return jax.jvp(gradient, operands, tangents)

    def forward(*operands):
        return jax.jvp(loss, operands, tangents)

    functions = gradient, *map(jax.jit, (gradient, second, forward))

    def all_of(padding):
        operands = jnp.where(MASK, x, padding), *parameters
        return [function(*operands) for function in functions]

    expected = all_of(0.5)
    assert not np.any(np.where(MASK, 0, expected[0][0]))
    for padding in (jnp.nan, jnp.inf, 1e300):
        agree(all_of(padding), expected, 1e-6)


def test_y_outside_of_mask_is_that_of_its_element(layer):
    x, *parameters = layer(SHAPE, -1)
    y = of_function(x, *parameters)
    found = of_function(x.at[0, 0].set(jnp.inf), *parameters)
    assert np.isnan(found[0, 0]).all()
    agree(found.at[0, 0].set(y[0, 0]), y)
    # A loss may use such an element, whose y depends on the parameters.
    gradient = jax.grad(lambda *operands: jnp.sum(of_function(*operands)[0, 0]), (0, 1, 2))
    dx, dgamma, dbeta = gradient(x, *parameters)
    agree(dgamma, (y[0, 0] - parameters[1]) / parameters[0])
    agree(dbeta, jnp.ones(CHANNELS))
    assert np.all(dx[0, 0] != 0)
