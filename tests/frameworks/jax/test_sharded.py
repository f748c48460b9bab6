"""Arrays that lie on several devices: formulas, which XLA splits, give what one device gives."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import backnorm.jax.linen
import backnorm.jax.nnx
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward
from backnorm.errors import ArgumentValueError
from backnorm.jax import batch_norm, batch_norm_backward, batch_norm_inference, ffi
from tests.support.dtypes import ELEMENT_TYPES

from .conftest import EPSILON, agree, gradient_of_gradient, weighed

SHAPE, CHANNELS = (8, 4, 6, 12), 12
# How x is cut, by names of the axes of a mesh.
CUTS = {
    "batch": P("d"),
    "space": P(None, "d"),
    "channels": P(None, None, None, "d"),
    "batch and space": P("b", "a"),
    "batch twice": P(("b", "a")),
    "batch, and copies": P("b"),
    "batch and channels": P("b", None, None, "a"),
    "nothing": P(),
}


def mesh_of(spec, kind=AxisType.Auto):
    if "d" in str(spec):
        return jax.make_mesh((4,), ("d",), axis_types=(kind,))
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)


def placed(spec, *arrays, mesh=None):
    """Return arrays, those of x's rank on several devices."""
    where = NamedSharding(mesh or mesh_of(spec), spec)
    return [jax.device_put(each, where) if each.ndim > 1 else each for each in arrays]


@pytest.fixture
def arrays(layer, normal):
    """Return x, gamma, beta and dy, in float64."""
    return [*layer(SHAPE, -1), normal(*SHAPE)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize("cut", CUTS)
def test_sharded_functions_match_kernels_of_one_device_without_gathering_x(cut, x64, arrays):
    """Both passes, in training and not; x stays where it is, and no kernel is called."""
    kind, tolerance = (np.float64, 1e-13) if x64 else (np.float32, 1e-6)
    x, gamma, beta, dy = (np.asarray(each, kind) for each in arrays)
    options = {"epsilon": EPSILON}
    with jax.enable_x64(x64):
        _, mean, variance = map(np.asarray, batch_norm(x, gamma, beta, **options))
        of_backward = (x, dy, mean, variance, gamma)
        functions = {
            partial(batch_norm, **options): (x, gamma, beta),
            partial(batch_norm_inference, **options): (x, mean, variance, gamma, beta),
            partial(batch_norm_backward, **options): of_backward,
            partial(batch_norm_backward, training=False, **options): of_backward,
        }
        for function, operands in functions.items():
            spread = placed(CUTS[cut], *operands)
            compiled = jax.jit(function).lower(*spread).compile()
            text = compiled.as_text()
            assert ffi.TARGET not in text
            assert "all-gather" not in text
            found = compiled(*spread)
            agree(found, function(*operands), tolerance)
            first = jax.tree.leaves(found)[0]
            assert first.sharding.is_equivalent_to(spread[0].sharding, x.ndim)


@pytest.mark.covering(0)
@pytest.mark.parametrize("cut", ["batch", "batch and channels", "channels"])
def test_derivatives_of_sharded_x_match_one_device(cut, arrays, normal):
    """The derivatives of all results, in both modes, and the second order."""
    x, gamma, beta, dy = arrays
    weights = normal(*SHAPE), normal(CHANNELS)
    loss = weighed(partial(batch_norm, epsilon=EPSILON), weights)
    second = gradient_of_gradient(loss, 3, (dy, weights[1], weights[1]))

    @jax.jit
    def every(x, gamma, beta, dx):
        operands = (x, gamma, beta)
        return (
            jax.grad(loss, (0, 1, 2))(*operands),
            jax.jvp(partial(batch_norm, epsilon=EPSILON), operands, (dx, beta, gamma)),
            jax.grad(second, (0, 1, 2))(*operands),
        )

    operands = (x, gamma, beta, dy)
    agree(every(*placed(CUTS[cut], *operands)), every(*operands))


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_sharded_forward_and_backward_in_float64_are_within_budget(dtype, rng):
    ratio = 1.0 if dtype.itemsize == 8 else 1e4
    data = realistic_data(SHAPE, dtype, data_format="NXC", rng=rng, ratio=ratio)
    options = {"epsilon": data.epsilon, "arithmetic": "float64"}

    def passed(check, function, operands, **more):
        function = jax.jit(partial(function, **options, **more))
        found = tuple(map(np.asarray, function(*placed(P("d"), *operands))))
        verdicts = check(*operands, found, data_format="NXC", **options, **more)
        assert [each.detail for each in verdicts.values() if not each.passed] == []

    passed(check_forward, batch_norm, (data.x, data.gamma, data.beta))
    for training in (True, False):
        passed(check_backward, batch_norm_backward, data.backward_inputs, training=training)


def test_sharded_backward_with_subnormal_variance_matches_one_device(normal):
    """XLA flushes subnormal numbers to 0; a variance of 1e-40 without epsilon is kept."""
    with jax.enable_x64(False):
        x = np.asarray(1e-20 * normal(64, 6), np.float32)
        dy = np.asarray(1e-20 * normal(64, 6), np.float32)
        gamma = np.float32(0.5) * np.arange(1, 7, dtype=np.float32)
        _, mean, variance = (np.asarray(each) for each in batch_norm(x, epsilon=0.0))
        assert (variance > 0).all()
        assert (variance < np.finfo(np.float32).tiny).all()
        backward = jax.jit(partial(batch_norm_backward, training=False, epsilon=0.0))
        expected = [np.asarray(each) for each in backward(x, dy, mean, variance, gamma)]
        x, dy = placed(P("d"), x, dy)
        dx, _, dbeta = backward(x, dy, mean, variance, gamma)
        assert np.any(expected[0])
        np.testing.assert_allclose(dx, expected[0], rtol=1e-5, atol=0)
        np.testing.assert_allclose(dbeta, expected[2], rtol=1e-5, atol=0)


@pytest.mark.covering(0)
@pytest.mark.parametrize("spec", [P("a", "b"), P(None, "b", None, None, "a"), P("b", None, "a")])
def test_vmap_with_sharded_instances_matches_one_device(spec, normal):
    """Under `jax.vmap`, instances, the batch and the channels being cut."""
    x, dy = 3 * normal(4, *SHAPE) + 2, normal(4, *SHAPE)
    gamma, beta = normal(4, CHANNELS) + 1, normal(CHANNELS)

    def both(x, gamma, beta, dy):
        y, pull = jax.vjp(lambda *g: batch_norm(*g, epsilon=EPSILON), x, gamma, beta)
        return y, pull((dy, gamma, gamma))

    mapped = jax.jit(jax.vmap(both, (0, 0, None, 0)))
    where = NamedSharding(mesh_of(spec), spec)
    spread = [jax.device_put(x, where), gamma, beta, jax.device_put(dy, where)]
    agree(mapped(*spread), mapped(x, gamma, beta, dy), 1e-13)
    # A gradient of what instances share is the same array in all of them.
    one = jax.jit(jax.vmap(partial(batch_norm_backward, epsilon=EPSILON), (None, 0, 0, 0, None)))
    operands = (x[0], dy, beta * gamma, gamma**2, beta)
    cut = P(*spec[1:])
    spread = [placed(cut, x[0], mesh=where.mesh)[0], jax.device_put(dy, where), *operands[2:]]
    agree(one(*spread), one(*operands), 1e-13)


def test_batch_norm_of_unequal_parts_matches_one_device(arrays):
    """Two of 4 devices have none of 6 samples: the padding of their parts is not counted."""
    x, gamma, beta, dy = arrays

    def both(x, gamma, beta, dy):
        y, pull = jax.vjp(lambda *g: batch_norm(*g, epsilon=EPSILON), x[:6], gamma, beta)
        return y, pull((dy[:6], gamma, beta))

    spread = placed(P("d"), x, gamma, beta, dy)
    agree(jax.jit(both)(*spread), jax.jit(both)(x, gamma, beta, dy), 1e-12)


def test_backward_with_operands_cut_differently_matches_one_device(arrays):
    x, gamma, beta, dy = arrays
    _, mean, variance = batch_norm(x, gamma, beta, epsilon=EPSILON)
    function = jax.jit(partial(batch_norm_backward, epsilon=EPSILON))
    mesh = mesh_of(P("d"))
    for first, second in ((P("d"), P(None, "d")), (P(), P("d"))):
        (x_there,) = placed(first, x, mesh=mesh)
        operands = (*placed(second, dy, mesh=mesh), mean, *placed(P(), variance), gamma)
        agree(function(x_there, *operands), function(x, dy, mean, variance, gamma), 1e-13)


def test_batch_norm_on_explicit_mesh_axes_matches_one_device(arrays):
    x, gamma, beta, dy = arrays
    mesh = mesh_of(P("d"), AxisType.Explicit)

    @jax.jit
    def both(x, gamma, beta, dy):
        y, pull = jax.vjp(lambda *g: batch_norm(*g, epsilon=EPSILON)[0], x, gamma, beta)
        return y, pull(dy)

    with jax.set_mesh(mesh):
        found = both(*placed(P("d"), x, gamma, beta, dy, mesh=mesh))
    agree(found, both(x, gamma, beta, dy), 1e-13)


def test_batch_norm_on_one_device_lowers_to_one_kernel_call(arrays):
    """One call of the kernel, also where a process has several devices."""
    x, gamma, beta, _ = arrays
    function = jax.jit(partial(batch_norm, epsilon=EPSILON))
    text = function.lower(x, gamma, beta).as_text()
    assert text.count("stablehlo.custom_call") == text.count(ffi.TARGET) == 1


def test_batch_norm_in_shard_map_calls_no_kernel_and_matches_each_part(arrays):
    x, gamma, beta, _ = arrays
    mapped = jax.shard_map(
        lambda x: batch_norm(x, gamma, beta, epsilon=EPSILON)[0],
        mesh=mesh_of(P("d")), in_specs=P("d"), out_specs=P("d"),
    )  # fmt: skip
    assert ffi.TARGET not in jax.jit(mapped).lower(x).as_text()
    parts = [batch_norm(part, gamma, beta, epsilon=EPSILON)[0] for part in jnp.split(x, 4)]
    agree(jax.jit(mapped)(x), jnp.concatenate(parts), 1e-13)


def test_exported_function_of_sharded_x_calls_no_kernel_and_matches_one_device(arrays):
    x, gamma, beta, _ = arrays
    function = jax.jit(partial(batch_norm, epsilon=EPSILON))
    spread = placed(P("d"), x, gamma, beta)
    again = export.deserialize(export.export(function)(*spread).serialize())
    agree(jax.jit(again.call)(*spread), function(x, gamma, beta), 1e-13)


@pytest.mark.parametrize("cut", ["batch", "nothing"])
def test_requests_that_formulas_cannot_meet_are_rejected_on_several_devices(cut):
    x, channels = np.ones((8, 4, 6, 12), np.float32), np.ones(12, np.float32)
    spread = placed(CUTS[cut], x)
    with jax.enable_x64(False):
        for name, value in (("reproducible", True), ("arithmetic", "float64")):
            options = {"epsilon": EPSILON, name: value}
            forward = partial(batch_norm, **options)
            backward = partial(batch_norm_backward, **options)
            for function in (forward, jax.jit(forward), partial(forward, activation="relu")):
                with pytest.raises(ArgumentValueError, match=f"^{name}: .*jax.numpy"):
                    function(*spread)
                function(x)
            with pytest.raises(ArgumentValueError, match=f"^{name}: .*jax.numpy"):
                backward(*spread, *spread, channels, channels)


@pytest.mark.long
def test_linen_model_of_sharded_batch_matches_one_device(normal):
    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.Dense(12, param_dtype=jnp.float64)(x)
            kinds = {"param_dtype": jnp.float64, "use_running_average": False}
            return linen.Dense(3)(linen.relu(backnorm.jax.linen.BatchNorm(**kinds)(x)))

    x, target, model = normal(16, 5), normal(16, 3), Model()
    variables = model.init(jax.random.key(0), x)

    @jax.jit
    def step(variables, x, target):
        def loss(params):
            y, changed = model.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.mean((y - target) ** 2), changed

        return jax.value_and_grad(loss, has_aux=True)(variables["params"])

    spread = placed(P("d"), x, target)
    agree(step(variables, *spread), step(variables, x, target), 1e-12)


def test_nnx_model_of_sharded_batch_matches_one_device(normal):
    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.first = nnx.Linear(5, 12, rngs=rngs, param_dtype=jnp.float64)
            self.norm = backnorm.jax.nnx.BatchNorm(12, rngs=rngs, param_dtype=jnp.float64)
            self.second = nnx.Linear(12, 3, rngs=rngs, param_dtype=jnp.float64)

        def __call__(self, x):
            return self.second(nnx.relu(self.norm(self.first(x))))

    x, target = normal(16, 5), normal(16, 3)

    def trained(*operands):
        model = Model()

        @nnx.jit
        def step(model, x, target):
            return nnx.value_and_grad(lambda m: jnp.mean((m(x) - target) ** 2))(model)

        value, gradients = step(model, *operands)
        return value, nnx.state(gradients), model.norm.mean[...], model.norm.var[...]

    agree(trained(*placed(P("d"), x, target)), trained(x, target), 1e-12)
