"""The cases of flax's two layers, all combinations of their arguments, and the comparison."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

SHAPE = (4, 3, 5, 2)

# Initialisers that draw numbers, so that the order of drawing counts.
INITIALISED = {
    "scale_init": linen.initializers.normal(0.5),
    "bias_init": linen.initializers.normal(),
}
PARAMETERS = [
    {},
    {"use_bias": False, "momentum": 0.9},
    {"use_scale": False, "epsilon": 0.1},
    {"use_scale": False, "use_bias": False, "use_fast_variance": False},
]
AXES = [-1, 1, (1, -1), (2, 3)]
# What the mask leaves of each channel differs; it broadcasts in several ways.
MASKS = [None, (4, 1, 1, 1), SHAPE]


def _cases():
    """Return all cases, which have a mask only in training; those for a sweep are marked."""
    found = []
    for frozen in (False, True):
        whole = itertools.product(AXES, [None] if frozen else MASKS, PARAMETERS)
        for k, (axis, mask, parameters) in enumerate(whole):
            case = {"axis": axis, "mask": mask, "frozen": frozen, **parameters}
            # Every axis meets every mask, and all parameters, in every run.
            rare = k % 4 and (k // 4 + k) % 3
            marks = [pytest.mark.sweep] if rare else []
            found.append(pytest.param(case, id=str(case), marks=marks))
    return found


CASES = _cases()
# (x, param_dtype, dtype)
TYPES = [
    pytest.param(*each, marks=[pytest.mark.sweep] if k % 3 else [])
    for k, each in enumerate(
        itertools.product(
            (jnp.bfloat16, jnp.float16, jnp.float32, jnp.int32),
            (jnp.float32, jnp.bfloat16),
            (None, jnp.bfloat16, jnp.float32, jnp.float16),
        )
    )
]


def split(case):
    """Return what the layer is made with, whether it is frozen, and the mask of its calls."""
    options = {**INITIALISED, **case}
    shape, frozen = options.pop("mask"), options.pop("frozen")
    if shape is None:
        return options, frozen, None
    bits = np.random.default_rng(7).random(shape) < 0.6
    bits.flat[0] = True
    # Several elements of every channel.
    bits[:2] = True
    return options, frozen, jnp.asarray(bits)


def weights(y):
    return jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


def scalar(y):
    """Return a number that depends on every element of y in a way of its own."""
    return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32))) * weights(y))


def linear(y):
    """Return a number whose gradient in y is the same whatever digits y has."""
    return jnp.sum(y.astype(jnp.promote_types(y.dtype, jnp.float32)) * weights(y))


def same(ours, theirs):
    """Assert that trees are alike in structure, shapes and types, and equal to the bit."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(mine, other)
