"""What the tests of the JAX adapter share: several CPU devices, 64 bits, textbook formulas."""

from __future__ import annotations

import os

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
    """Return the scalar function whose gradients take y, mean and variance all into account."""

    def loss(*inputs):
        y, mean, variance = function(*inputs)
        w, v = weights
        return jnp.sum(jnp.sin(y) * w) + jnp.sum(mean * v) + jnp.sum(variance**2 * v)

    return loss


def gradient_of_gradient(loss, count, weights):
    """Return a scalar function of the gradients of `loss`, none of them in a special place."""

    def second(*inputs):
        first = jax.grad(loss, range(count))(*inputs)
        return sum(
            jnp.sum(jnp.cos(each) * weight) for each, weight in zip(first, weights, strict=True)
        )

    return second


@pytest.fixture
def normal(rng):
    """Return a function that makes float64 arrays of a shape."""
    return lambda *shape: jnp.asarray(rng.normal(size=shape))


@pytest.fixture
def layer(normal):
    """Return a function that makes x, gamma and beta for a shape and a channel axis."""

    def make(shape, axis):
        channels = shape[axis]
        return 3.0 * normal(*shape) + 2.0, normal(channels) + 1.0, normal(channels)

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
def arguments(normal):
    """Return a function that makes as many arguments, or their tangents."""

    def make(ranks):
        from .pairs import AXIS, SHAPE

        made = [normal(*SHAPE) if rank == 3 else normal(SHAPE[AXIS]) ** 2 + 0.3 for rank in ranks]
        return tuple(made)

    return make


@pytest.fixture
def scalar(normal):
    """Return a function that makes a scalar function of one, with weights of its own."""
    from .pairs import AXIS, SHAPE

    weights = [normal(*SHAPE), normal(SHAPE[AXIS]), normal(SHAPE[AXIS])]

    def make(function):
        def loss(*given):
            results = jax.tree.leaves(function(*given))
            pairs = zip(results, weights, strict=False)
            return sum(jnp.sum(jnp.sin(each + each**2) * weight) for each, weight in pairs)

        return loss

    return make
