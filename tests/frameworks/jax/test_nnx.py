"""The layer for flax.nnx beside flax's own: same state, same results, same gradients."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax.nnx import BatchNorm

from .conftest import agree
from .flax_cases import CASES, SHAPE, TYPES, linear, same, scalar, split

X64 = {"param_dtype": jnp.float64}
KINDS = (BatchNorm, nnx.BatchNorm)

# flax's layer keeps statistics of float64 in float32 by the way that JAX warns of.
pytestmark = pytest.mark.filterwarnings("ignore:scatter inputs have incompatible:FutureWarning")


def stepped(kind, features, x, options, frozen, mask, of_y=scalar):
    """Return the state of a layer, and what a call and its gradients make of it."""
    layer = kind(features, **options, rngs=nnx.Rngs(0))
    made = nnx.clone(nnx.state(layer))
    rng = np.random.default_rng(3)
    for each in (layer.mean, layer.var):
        each[...] = jnp.asarray(rng.uniform(0.5, 2.0, each[...].shape), jnp.float32)

    def loss(layer, x):
        y = layer(x, use_running_average=frozen, mask=mask)
        return of_y(y), y

    integers = jnp.issubdtype(x.dtype, jnp.integer)
    every = nnx.DiffState(0, nnx.Param) if integers else (nnx.DiffState(0, nnx.Param), 1)
    gradients, y = nnx.grad(loss, argnums=every, has_aux=True)(layer, x)
    return made, (gradients, y, nnx.state(layer))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_layer_with_options_axes_and_masks_matches_flax(case, normal):
    options, frozen, mask = split(case)
    axis = options["axis"]
    x = normal(*SHAPE) + 2.0
    if isinstance(axis, tuple):
        # flax's layer cannot train with several axes of features; it sees them as one.
        features = int(np.prod([SHAPE[k] for k in axis]))
        x = x.astype(jnp.float32)
        y = BatchNorm(features, **options, rngs=nnx.Rngs(0))(x, frozen, mask=mask)
        moved = jnp.moveaxis(x, axis, (-2, -1)).reshape(*[SHAPE[k] for k in rest(axis)], features)
        if mask is not None:
            mask = jnp.moveaxis(jnp.broadcast_to(mask, SHAPE), axis, (-2, -1)).reshape(moved.shape)
        options["axis"] = -1
        other = nnx.BatchNorm(features, **options, rngs=nnx.Rngs(0))(moved, frozen, mask=mask)
        agree(jnp.moveaxis(y, axis, (-2, -1)).reshape(moved.shape), other, 1e-5)
        return
    ours, theirs = (
        stepped(kind, SHAPE[axis], x, {**options, **X64}, frozen, mask) for kind in KINDS
    )
    same(ours[0], theirs[0])
    agree(ours[1][:2], theirs[1][:2])
    # flax computes the statistics in float64, too, and keeps them in float32.
    agree(ours[1][2], theirs[1][2], 1e-7)


def rest(axis):
    return [k for k in range(len(SHAPE)) if k not in [each % len(SHAPE) for each in axis]]


@pytest.mark.long
@pytest.mark.parametrize(("operands", "param_dtype", "dtype"), TYPES)
def test_layer_types_match_flax_and_values_match_flax_in_float32(
    operands, param_dtype, dtype, normal
):
    x = (4.0 * normal(*SHAPE) + 2.0).astype(operands)
    for frozen in (False, True):
        options = {"dtype": dtype, "param_dtype": param_dtype}
        ours, theirs = (
            stepped(kind, SHAPE[-1], x, options, frozen, None, linear) for kind in KINDS
        )
        same(ours[0], theirs[0])
        for mine, other in zip(*map(jax.tree.leaves, (ours[1], theirs[1])), strict=True):
            assert (mine.shape, mine.dtype) == (other.shape, other.dtype)
        # flax's sums of 16-bit gradients have few digits left; those in float32 have them.
        narrow = x.astype(ours[1][1].dtype).astype(jnp.float32)
        _, wide = stepped(nnx.BatchNorm, SHAPE[-1], narrow, {}, frozen, None, linear)
        # Of integers there is no gradient.
        of_params = isinstance(ours[1][0], tuple)
        found, expected = (
            jax.tree.map(lambda each: each.astype(jnp.float32), tree)
            for tree in (ours[1], wide if of_params else (wide[0][0], *wide[1:]))
        )
        agree(found, expected, 3e-2)


def as_it_is(arrays, *, dtype):
    return arrays


@pytest.mark.long
def test_layer_with_custom_promote_dtype_matches_flax(normal):
    def to_half(arrays, *, dtype):
        assert dtype is None
        return tuple(None if each is None else each.astype(jnp.bfloat16) for each in arrays)

    x = normal(4, 3, 5)
    options = {"promote_dtype": to_half, "use_bias": False, "use_running_average": True}
    ours, theirs = (kind(5, **options, rngs=nnx.Rngs(0))(x) for kind in KINDS)
    assert ours.dtype == jnp.bfloat16
    agree(ours, theirs, 1e-2)


@pytest.mark.covering(0)
@pytest.mark.parametrize("groups", [None, [[0, 3], [1, 2]]])
@pytest.mark.parametrize("masked", [False, True])
def test_layer_in_pmap_with_axis_name_matches_flax(groups, masked, normal):
    x = normal(4, 3, 5)
    mask = jnp.asarray([True, False, True]).reshape(3, 1) if masked else None
    found = []
    for kind in KINDS:
        layer = kind(5, axis_name="d", axis_index_groups=groups, **X64, rngs=nnx.Rngs(0))
        graph, state = nnx.split(layer)

        def step(x, state, graph=graph):
            def loss(x, state):
                layer = nnx.merge(graph, state, copy=True)
                y = layer(x, mask=mask)
                return scalar(y), (y, nnx.state(layer))

            return jax.grad(loss, has_aux=True)(x, state)

        found.append(jax.pmap(step, axis_name="d", in_axes=(0, None))(x, state))
    agree(*found, 1e-7)


def test_layer_variables_have_given_metadata_and_flax_types():
    options = {"scale_metadata": {"note": 2}, "bias_metadata": {"note": 3}}
    for kind in KINDS:
        layer = kind(4, **options, rngs=nnx.Rngs(0))
        assert (layer.scale.note, layer.bias.note) == (2, 3)
        assert isinstance(layer.scale, nnx.Param)
        assert isinstance(layer.mean, nnx.BatchStat)


class Model(nnx.Module):
    """A small model with two of the layers."""

    def __init__(self, kind, *, rngs):
        self.first = nnx.Conv(3, 4, (3, 3), rngs=rngs)
        self.norm = kind(4, rngs=rngs)
        self.second = nnx.Linear(4, 5, rngs=rngs)
        self.last = kind(5, use_bias=False, momentum=0.9, rngs=rngs)

    def __call__(self, x):
        return self.last(self.second(nnx.relu(self.norm(self.first(x))).mean((1, 2))))


def models():
    return [Model(kind, rngs=nnx.Rngs(0)) for kind in KINDS]


def total(model, x):
    return scalar(model(x))


@pytest.fixture
def images(normal):
    return normal(6, 5, 5, 3).astype(jnp.float32)


class TestModels:
    def trained(self, model, images):
        @nnx.jit
        def step(model, x):
            value, gradients = nnx.value_and_grad(total)(model, x)
            params = nnx.state(model, nnx.Param)
            moved = jax.tree.map(lambda p, g: p - 0.05 * g, params, gradients)
            nnx.update(model, moved)
            return value

        return [step(model, images) for _ in range(3)]

    @pytest.mark.long
    def test_model_in_training_and_evaluation_matches_flax(self, images):
        ours, theirs = models()
        agree(self.trained(ours, images), self.trained(theirs, images), 1e-5)
        agree(nnx.state(ours), nnx.state(theirs), 1e-4)
        for model in (ours, theirs):
            model.eval()
            assert model.norm.use_running_average
        agree(ours(images), theirs(images), 1e-4)
        before = jax.tree.map(jnp.copy, nnx.state(ours, nnx.BatchStat))
        ours(images)
        same(nnx.state(ours, nnx.BatchStat), before)
        ours.train()
        ours(images)
        assert not np.array_equal(ours.norm.mean[...], before["norm"]["mean"][...])

    @pytest.mark.long
    def test_model_accepts_state_of_flax_model_with_same_paths(self, images):
        ours, theirs = models()
        theirs(images)
        nnx.update(ours, nnx.state(theirs))
        same(nnx.state(ours), nnx.state(theirs))
        paths = [list(nnx.to_flat_state(nnx.state(model)).paths) for model in (ours, theirs)]
        assert paths[0] == paths[1]
        pure = [nnx.to_pure_dict(nnx.state(model)) for model in (ours, theirs)]
        same(*pure)

    def test_view_with_use_running_average_matches_flax(self, images):
        found = []
        for kind in KINDS:
            layer = kind(3, rngs=nnx.Rngs(0))
            frozen = nnx.view(layer, use_running_average=True)
            moving = nnx.view(layer, use_running_average=False)
            found.append([frozen(images), moving(images), nnx.state(frozen)])
        agree(*found, 1e-5)

    def test_split_and_merged_model_matches_flax(self, images):
        found = []
        for model in models():
            graph, params, stats = nnx.split(model, nnx.Param, nnx.BatchStat)

            @jax.jit
            def step(params, stats, x, graph=graph):
                def loss(params, stats):
                    model = nnx.merge(graph, params, stats, copy=True)
                    return total(model, x), nnx.state(model, nnx.BatchStat)

                return jax.value_and_grad(loss, has_aux=True)(params, stats)

            found.append(step(params, stats, images))
        agree(*found, 1e-4)

    @pytest.mark.long
    def test_vmap_of_models_matches_flax(self, images):
        found = []
        for kind in KINDS:

            @nnx.split_rngs(splits=3)
            @nnx.vmap
            def make(rngs):
                return Model(kind, rngs=rngs)  # noqa: B023 - called at once

            model = make(nnx.Rngs(0))
            every = nnx.vmap(nnx.value_and_grad(total), in_axes=(0, None))
            found.append((every(model, images), nnx.state(model)))
        agree(*found, 1e-4)

    def test_layer_in_vmap_with_axis_name_matches_flax(self, normal):
        x, found = normal(4, 3, 5), []
        for kind in KINDS:
            layer = kind(5, axis_name="parts", **X64, rngs=nnx.Rngs(0))
            axes = nnx.StateAxes({...: None})
            mapped = nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, 0), axis_name="parts")
            found.append((mapped(layer, x), nnx.state(layer)))
        agree(*found, 1e-7)

    @pytest.mark.long
    @pytest.mark.parametrize("transform", [nnx.remat, nnx.jit], ids=["remat", "jit"])
    def test_model_within_nnx_transform_matches_flax(self, transform, images):
        found = []
        for model in models():
            function = transform(lambda model, x: model(x))
            loss = partial(lambda model, x, f: scalar(f(model, x)), f=function)
            found.append((nnx.grad(loss)(model, images), nnx.state(model)))
        agree(*found, 1e-4)

    @pytest.mark.long
    def test_jvp_of_model_matches_flax(self, images):
        found = []
        for model in models():
            graph, state = nnx.split(model)

            def evaluated(x, state, graph=graph):
                return nnx.merge(graph, state, copy=True)(x)

            still = jax.tree.map(jnp.zeros_like, state)
            found.append(jax.jvp(evaluated, (images, state), (images**2, still)))
        agree(*found, 1e-4)


def test_layer_rejects_bad_settings(normal):
    x = normal(6, 5, 4)
    with pytest.raises(ArgumentValueError, match=r"^use_running_average: "):
        BatchNorm(4, use_running_average=None, rngs=nnx.Rngs(0))(x)
    with pytest.raises(ArgumentValueError, match=r"^axis: .*3"):
        BatchNorm(4, axis=3, rngs=nnx.Rngs(0))(x)
    with pytest.raises(ArgumentTypeError, match=r"^x: .*complex128"):
        BatchNorm(4, promote_dtype=as_it_is, rngs=nnx.Rngs(0))(x + 1j)
    with pytest.raises(ArgumentValueError, match=r"^gamma: .*\(3,\).*\(4,\)"):
        BatchNorm(3, rngs=nnx.Rngs(0))(x)
    with pytest.raises(ArgumentValueError, match=r"^axis_index_groups: "):
        BatchNorm(4, axis_index_groups=[[0]], rngs=nnx.Rngs(0))(x)
