"""Fixtures of the JAX adapter's tests: several CPU devices, 64 bits, textbook formulas."""

from __future__ import annotations

import os
from functools import partial

# Read when JAX makes its CPU devices.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

jax.config.update("jax_enable_x64", True)

EPSILON = 1e-3
# (shape, axis): channels first, last, in the middle, alone; a negative axis.
SHAPES = [((6, 5, 3, 4), 1), ((6, 3, 4, 5), -1), ((4, 3, 5, 2), -2), ((7, 9), 1), ((5, 8), 0)]


@partial(jax.jit, static_argnames=("epsilon", "axis", "axis_name"))
def textbook(x, gamma, beta, *, epsilon=EPSILON, axis=-1, axis_name=None):
    """Batch normalisation as one writes it, for JAX to differentiate."""
    others = tuple(k for k in range(x.ndim) if k != axis % x.ndim)
    column = [-1 if k == axis % x.ndim else 1 for k in range(x.ndim)]
    mean = jnp.mean(x, others)
    mean = mean if axis_name is None else jax.lax.pmean(mean, axis_name)
    variance = jnp.mean((x - mean.reshape(column)) ** 2, others)
    variance = variance if axis_name is None else jax.lax.pmean(variance, axis_name)
    y = (x - mean.reshape(column)) / jnp.sqrt(variance + epsilon).reshape(column)
    return y * gamma.reshape(column) + beta.reshape(column), mean, variance


def agree(ours, theirs, tolerance=1e-11):
    """Assert that two trees of arrays are alike."""
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert mine.dtype == other.dtype
        scale = 1.0 + np.abs(np.asarray(other, np.float64)).max(initial=0.0)
        difference = np.abs(np.asarray(mine, np.float64) - np.asarray(other, np.float64))
        assert difference.max(initial=0.0) <= tolerance * scale
        assert np.isfinite(np.asarray(other, np.float64)).all()


def weighed(function, weights):
    """Return the scalar function whose gradients take y, mean and variance all into account.

    What is not the function's is compiled as one: operation by operation it takes most of a test.
    """

    @jax.jit
    def total(y, mean, variance):
        w, v = weights
        return jnp.sum(jnp.sin(y) * w) + jnp.sum(mean * v) + jnp.sum(variance**2 * v)

    return lambda *inputs: total(*function(*inputs))


def gradient_of_gradient(loss, count, weights):
    """Return a scalar function of the gradients of `loss`, none of them in a special place."""

    @jax.jit
    def total(first):
        return sum(
            jnp.sum(jnp.cos(each) * weight) for each, weight in zip(first, weights, strict=True)
        )

    return lambda *inputs: total(jax.grad(loss, range(count))(*inputs))


#: Where bits, memory or the smallest numbers are what XLA makes of its operations.
OPTIMISED = {"test_arithmetic", "test_numerics", "test_reproducible", "test_second_order"}


@pytest.fixture(scope="module", autouse=True)
def few_optimisations(request):
    """Spare XLA the passes of LLVM, a third of the run, where results have a tolerance."""
    few = request.path.stem not in OPTIMISED
    if jax.config.values["jax_disable_most_optimizations"] != few:
        jax.config.update("jax_disable_most_optimizations", few)
        # JAX's caches do not distinguish programs by this option, which changes bits.
        jax.clear_caches()


@pytest.fixture
def normal(rng):
    """Return a function that makes float64 arrays of a shape."""
    return lambda *shape: jnp.asarray(rng.normal(size=shape))


@pytest.fixture
def layer(rng):
    """Return a function that makes x, gamma and beta for a shape and a channel axis."""

    def make(shape, axis):
        laws = (2.0, 3.0, shape), (1.0, 1.0, shape[axis]), (0.0, 1.0, shape[axis])
        return tuple(jnp.asarray(rng.normal(*law)) for law in laws)

    return make


@pytest.fixture
def inputs(layer):
    """Return x, gamma and beta of the layer of `one_layer`."""
    from .one_layer import AXIS, SHAPE

    return layer(SHAPE, AXIS)


@pytest.fixture
def pair(normal):
    """The same scalar function with our layer and with the textbook's."""
    from .one_layer import AXIS, SHAPE, ours, theirs

    weights = normal(*SHAPE), normal(SHAPE[AXIS])
    return weighed(ours, weights), weighed(theirs, weights)


@pytest.fixture
def arguments(normal, rng):
    """Return a function that makes as many arguments, or their tangents."""

    def make(ranks):
        from .pairs import AXIS, SHAPE

        return tuple(
            normal(*SHAPE) if rank == 3 else jnp.asarray(rng.normal(size=SHAPE[AXIS]) ** 2 + 0.3)
            for rank in ranks
        )

    return make


@pytest.fixture
def scalar(normal):
    """Return a function that makes a scalar function of one, with weights of its own."""
    from .pairs import AXIS, SHAPE

    weights = [normal(*SHAPE), normal(SHAPE[AXIS]), normal(SHAPE[AXIS])]

    @jax.jit
    def total(results):
        pairs = zip(results, weights, strict=False)
        return sum(jnp.sum(jnp.sin(each + each**2) * weight) for each, weight in pairs)

    return lambda function: lambda *operands: total(jax.tree.leaves(function(*operands)))
