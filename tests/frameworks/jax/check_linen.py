"""The layer for flax beside flax's own: same variables, same results, same gradients."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backnorm.errors import ArgumentValueError

from .conftest import agree

INSTALLED = importlib.util.find_spec("flax") is not None
pytestmark = pytest.mark.skipif(not INSTALLED, reason="flax is not installed")

if INSTALLED:
    from flax import linen

    from backnorm.jax.linen import BatchNorm

X64 = {"param_dtype": jnp.float64, "force_float32_reductions": False}
LAYERS = [
    {"use_running_average": False, **X64},
    {"use_running_average": False, "axis": 1, "momentum": 0.9, "epsilon": 1e-3, **X64},
    {"use_running_average": False, "use_bias": False, **X64},
    {"use_running_average": False, "use_scale": False, "use_bias": False, **X64},
    {"use_running_average": True, **X64},
]


def both(x, how, **call):
    """Return what our layer and flax's return for x, and their gradients."""
    found = []
    for kind in (BatchNorm, linen.BatchNorm):
        layer = kind(**how)
        variables = layer.init(jax.random.key(0), x)

        def loss(params, x, layer=layer, variables=variables):
            given = {**variables, "params": params}
            y, changed = layer.apply(given, x, mutable=["batch_stats"], **call)
            return jnp.sum(jnp.sin(y).astype(jnp.float32) * jnp.cos(jnp.arange(y.size)).reshape(
                y.shape)), (y, changed)  # fmt: skip

        params = variables.get("params", {})
        gradients, (y, changed) = jax.grad(loss, (0, 1), has_aux=True)(params, x)
        found.append((variables, y, changed, gradients))
    return found


@pytest.mark.parametrize("how", LAYERS)
def test_as_flax_does(how, normal):
    ours, theirs = both(normal(6, 5, 4, 3) + 2.0, how)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    agree(ours, theirs, 1e-6)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("given", [jnp.bfloat16, jnp.float32])
def test_types(given, dtype, normal):
    x = (normal(6, 5, 4, 3) + 2.0).astype(given)
    ours, theirs = both(x, {"use_running_average": False, "dtype": dtype})
    agree(ours, theirs, 3e-2)


def test_moving_averages_move(normal):
    x = normal(50, 3) * 3.0 + 7.0
    layer = BatchNorm(use_running_average=False, momentum=0.5, **X64)
    variables = layer.init(jax.random.key(0), x)
    np.testing.assert_array_equal(variables["batch_stats"]["mean"], 0.0)
    for _ in range(40):
        _, changed = layer.apply(variables, x, mutable=["batch_stats"])
        variables = {**variables, **changed}
    np.testing.assert_allclose(variables["batch_stats"]["mean"], x.mean(0), rtol=1e-9)
    np.testing.assert_allclose(variables["batch_stats"]["var"], x.var(0), rtol=1e-9)
    frozen = BatchNorm(use_running_average=True, **X64)
    y = frozen.apply(variables, x)
    np.testing.assert_allclose(y.mean(0), 0.0, atol=1e-6)


def test_statistics_of_all_devices(normal):
    x = normal(4, 3, 5)
    how = {"use_running_average": False, "axis_name": "d", **X64}
    found = []
    for kind in (BatchNorm, linen.BatchNorm):
        layer = kind(**how)
        variables = layer.init(jax.random.key(0), x[0])
        found.append(
            jax.pmap(
                lambda x, layer=layer, variables=variables: layer.apply(
                    variables, x, mutable=["batch_stats"]
                ),
                axis_name="d",
            )(x)
        )
    agree(*found, 1e-6)


def test_what_is_not_supported(normal):
    x = normal(6, 5, 4)
    for how, call in (
        ({"axis": (1, 2)}, {}),
        ({"axis_index_groups": [[0]]}, {}),
        ({}, {"mask": jnp.ones((6, 1, 1))}),
    ):
        with pytest.raises(ArgumentValueError):
            BatchNorm(use_running_average=False, **how).init(jax.random.key(0), x, **call)
