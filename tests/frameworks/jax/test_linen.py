"""The layer for flax.linen beside flax's own: same variables, same results, same gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, serialization

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax.linen import BatchNorm

from .conftest import agree
from .flax_cases import CASES, SHAPE, TYPES, same, scalar, split

X64 = {"param_dtype": jnp.float64, "force_float32_reductions": False}
KINDS = (BatchNorm, linen.BatchNorm)


def stepped(kind, x, options, frozen, mask, **call):
    """Return the variables of a layer, and what a call and its gradients make of them."""
    layer = kind(**options)
    made = layer.init(jax.random.key(0), x, frozen, mask=mask)
    rng = np.random.default_rng(3)
    averages = jax.tree.map(
        lambda each: jnp.asarray(rng.uniform(0.5, 2.0, each.shape), each.dtype), made["batch_stats"]
    )
    params = made.get("params", {})

    def step(params, x):
        def loss(params, x):
            operands = {"params": params, "batch_stats": averages}
            y, changed = layer.apply(
                operands, x, frozen, mask=mask, mutable=["batch_stats"], **call
            )
            return scalar(y), (y, changed)

        integers = jnp.issubdtype(x.dtype, jnp.integer)
        return jax.grad(loss, 0 if integers else (0, 1), has_aux=True)(params, x)

    return made, step(params, x)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_layer_with_options_axes_and_masks_matches_flax(case, normal):
    options, frozen, mask = split(case)
    x = normal(*SHAPE) + 2.0
    ours, theirs = (stepped(kind, x, {**options, **X64}, frozen, mask) for kind in KINDS)
    same(ours[0], theirs[0])
    agree(ours[1], theirs[1])


@pytest.mark.long
@pytest.mark.parametrize(("operands", "param_dtype", "dtype"), TYPES)
def test_layer_types_and_values_match_flax(operands, param_dtype, dtype, normal):
    x = (4.0 * normal(*SHAPE) + 2.0).astype(operands)
    for frozen in (False, True):
        options = {"dtype": dtype, "param_dtype": param_dtype}
        ours, theirs = (stepped(kind, x, options, frozen, None) for kind in KINDS)
        same(ours[0], theirs[0])
        agree(ours[1], theirs[1], 3e-2)


@pytest.mark.long
def test_running_statistics_of_float64_x_stay_float32(normal):
    _, (_, (y, changed)) = stepped(BatchNorm, normal(6, 3), {}, False, None)
    assert y.dtype == jnp.float64
    assert {each.dtype for each in jax.tree.leaves(changed)} == {jnp.dtype(jnp.float32)}


def test_layer_with_mask_ignores_masked_elements(normal):
    x, mask = normal(*SHAPE), jnp.arange(4).reshape(4, 1, 1, 1) < 2
    layer = BatchNorm(use_running_average=False, **X64)
    variables = layer.init(jax.random.key(0), x)
    call = partial(layer.apply, variables, mask=mask, mutable=["batch_stats"])
    y, changed = call(x)
    other, same_change = call(jnp.where(mask, x, jnp.nan))
    agree(same_change, changed)
    agree(other[:2], y[:2])
    # A number is as good as a bool, as it is to flax.
    agree(layer.apply(variables, x, mask=1.0 * mask, mutable=["batch_stats"]), (y, changed))
    nothing = layer.apply(variables, x, mask=jnp.zeros_like(mask), mutable=["batch_stats"])
    assert all(np.isnan(each).all() for each in jax.tree.leaves(nothing))


def test_running_statistics_converge_to_those_of_repeated_batch(normal):
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


@pytest.mark.covering(0)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [None, [[0, 1], [2, 3]], [[0, 3], [1, 2]]])
def test_layer_in_pmap_with_axis_name_matches_flax(groups, masked, normal):
    x, mask = normal(4, 3, 5), jnp.asarray([True, False, True]).reshape(1, 3, 1)
    mask = jnp.broadcast_to(mask, (4, 3, 1)) if masked else None
    options = {"use_running_average": False, "axis_name": "d", "axis_index_groups": groups, **X64}
    found = []
    for kind in KINDS:
        layer = kind(**options)
        variables = layer.init(jax.random.key(0), x[0])

        def step(x, mask, layer=layer, variables=variables):
            def loss(x):
                found = layer.apply(variables, x, mask=mask, mutable=["batch_stats"])
                return scalar(found[0]), found

            return jax.grad(loss, has_aux=True)(x)

        found.append(
            jax.pmap(step, axis_name="d", in_axes=(0, None if mask is None else 0))(x, mask)
        )
    agree(*found)


class Block(linen.Module):
    """A part of a model, with the layer inside of what linen transforms."""

    kind: type
    train: bool = True

    @linen.compact
    def __call__(self, x, _=None):
        x = linen.Dense(3, param_dtype=jnp.float64)(x)
        x = self.kind(use_running_average=not self.train, **X64)(x)
        return linen.relu(x), None


def several(kind):
    axes = {"params": 0, "batch_stats": 0}
    keys = {"params": True}
    return {
        "remat": linen.remat(Block)(kind),
        "jit": linen.jit(Block)(kind),
        "vmap": linen.vmap(Block, variable_axes=axes, split_rngs=keys)(kind),
        "scan": linen.scan(Block, variable_axes=axes, split_rngs=keys, length=2)(kind),
    }


@pytest.mark.long
@pytest.mark.parametrize("name", ["remat", "jit", "vmap", "scan"])
def test_layer_within_linen_transform_matches_flax(name, normal):
    x, found = normal(2, 6, 3), []
    for kind in KINDS:
        model = several(kind)[name]
        variables = model.init(jax.random.key(0), x)

        def loss(params, model=model, variables=variables):
            operands = {**variables, "params": params}
            (y, _), changed = model.apply(operands, x, mutable=["batch_stats"])
            return scalar(y), changed

        found.append((variables, jax.grad(loss, has_aux=True)(variables["params"])))
    names = [jax.tree.map(lambda _: 0, serialization.to_state_dict(each[0])) for each in found]
    # The class has flax's name, and so has what is named after it.
    assert names[0] == names[1]
    agree(*found, 1e-9)


def test_layer_rejects_bad_settings(normal):
    x = normal(6, 5, 4)
    for options, call, error, message in (
        ({"axis": 3}, {}, ArgumentValueError, "^axis: .*3"),
        ({"axis": ()}, {}, ArgumentValueError, "^axis: "),
        ({}, {"mask": jnp.ones((6, 2, 1))}, ValueError, "roadcast"),
        ({"axis_name": "nowhere"}, {}, ArgumentValueError, "^axis_name: .*nowhere"),
    ):
        layer = BatchNorm(use_running_average=False, **options)
        variables = BatchNorm(use_running_average=False).init(jax.random.key(0), x)
        with pytest.raises(error, match=message):
            layer.apply(variables, x, mutable=["batch_stats"], **call)
    with pytest.raises(ArgumentTypeError, match=r"^x: .*complex128"):
        BatchNorm(use_running_average=False).init(jax.random.key(0), x + 1j)
