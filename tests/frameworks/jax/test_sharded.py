"""Arrays that lie on several devices: what one device gives, and x stays where it is."""

from __future__ import annotations

import math
import re
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
from backnorm.jax import batch_norm, batch_norm_backward, batch_norm_inference, ffi, sharding
from tests.support.dtypes import ELEMENT_TYPES

from .conftest import EPSILON, agree, gradient_of_gradient, weighed

SHAPE, CHANNELS = (8, 4, 6, 12), 12
# How x is cut, by names of the axes of a mesh; in how many parts each channel is; the axes that
# channels are cut by.
CUTS = {
    "batch": (P("d"), 4, P()),
    "space": (P(None, "d"), 4, P()),
    "channels": (P(None, None, None, "d"), 1, P("d")),
    "batch and space": (P("b", "a"), 4, P()),
    "batch twice": (P(("b", "a")), 4, P()),
    "batch, and copies": (P("b"), 2, P()),
    "batch and channels": (P("b", None, None, "a"), 2, P("a")),
    "nothing": (P(), 1, P()),
}
# What XLA has for telling other devices something, and bytes of types.
_TOLD = "all-reduce|all-gather|all-to-all|collective-permute|collective-broadcast|reduce-scatter"
_SIZES = {"f64": 8, "s64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "pred": 1}


@pytest.fixture
def gathered(monkeypatch):
    """Take the rule away, of functions that are traced in the test."""
    monkeypatch.setattr(sharding, "devices_of", lambda context: ())


def mesh_of(spec, kind=AxisType.Auto):
    if "d" in str(spec):
        return jax.make_mesh((4,), ("d",), axis_types=(kind,))
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)


def placed(spec, *arrays, mesh=None):
    """Return arrays, those of x's rank on several devices."""
    where = NamedSharding(mesh or mesh_of(spec), spec)
    return [jax.device_put(each, where) if each.ndim > 1 else each for each in arrays]


def told(compiled):
    """Return the bytes that each device is told, by the operation that tells it."""
    found = {}
    for line in compiled.as_text().splitlines():
        match = re.search(rf"= (.*?) ({_TOLD})(-start)?\(", line)
        if match:
            sizes = re.findall(r"([a-z]+\d*)\[([\d,]*)\]", match[1])
            size = sum(
                _SIZES[t] * math.prod(map(int, filter(None, n.split(",")))) for t, n in sizes
            )
            found[match[2]] = found.get(match[2], 0) + size
    return found


@pytest.fixture
def arrays(layer, normal):
    """Return x, gamma, beta and dy, in float64."""
    return [*layer(SHAPE, -1), normal(*SHAPE)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("cut", CUTS)
def test_sharded_functions_match_one_device_and_all_reduce_channel_sums(cut, arrays):
    """Both passes, in training and not: devices exchange two numbers per channel, nothing of x."""
    spec, parts, of_channels = CUTS[cut]
    x, gamma, beta, dy = arrays
    options = {"epsilon": EPSILON}
    _, mean, variance = batch_norm(x, gamma, beta, **options)
    functions = {
        "forward": (partial(batch_norm, **options), (x, gamma, beta)),
        "inference": (partial(batch_norm_inference, **options), (x, mean, variance, gamma, beta)),
        "backward": (partial(batch_norm_backward, **options), (x, dy, mean, variance, gamma)),
        "frozen": (
            partial(batch_norm_backward, training=False, **options),
            (x, dy, mean, variance, gamma),
        ),
    }
    for name, (function, operands) in functions.items():
        spread = placed(spec, *operands)
        compiled = jax.jit(function).lower(*spread).compile()
        found = compiled(*spread)
        agree(found, function(*operands), 1e-13)
        first, *others = jax.tree.leaves(found)
        assert first.sharding.is_equivalent_to(spread[0].sharding, x.ndim)
        for each in others:
            expected = NamedSharding(spread[0].sharding.mesh, of_channels)
            assert each.sharding.is_equivalent_to(expected, 1)
        channels = CHANNELS // (2 if cut == "batch and channels" else 1)
        silent = parts == 1 or name == "inference"
        assert told(compiled) == ({} if silent else {"all-reduce": 2 * channels * 8})


@pytest.fixture
def gspmd():
    jax.config.update("jax_use_shardy_partitioner", False)
    yield
    jax.config.update("jax_use_shardy_partitioner", True)


def test_gspmd_partitioner_gathers_x_and_matches_one_device(arrays, gspmd):
    x, gamma, beta, _ = arrays
    function = jax.jit(partial(batch_norm, epsilon=EPSILON))
    spread = placed(P("d"), x, gamma, beta)
    assert "all-gather" in told(function.lower(*spread).compile())
    agree(function(*spread), function(x, gamma, beta), 1e-13)


def test_batch_norm_without_sharding_rule_gathers_x(arrays, gathered):
    """The test of what devices exchange can fail: here XLA gathers x."""
    x, gamma, beta, _ = arrays
    spread = placed(P("d"), x, gamma, beta)
    compiled = jax.jit(partial(batch_norm, epsilon=EPSILON)).lower(*spread).compile()
    assert told(compiled) == {"all-gather": x.nbytes}


@pytest.mark.covering(0)
@pytest.mark.parametrize("cut", ["batch", "batch and channels", "channels"])
def test_derivatives_of_sharded_x_match_one_device_without_gathering_x(cut, arrays, normal):
    """Of all results, in both modes, and of the second order; of x nothing is gathered."""
    spec = CUTS[cut][0]
    x, gamma, beta, dy = arrays
    weights = normal(*SHAPE), normal(CHANNELS)
    loss = weighed(partial(batch_norm, epsilon=EPSILON), weights)
    second = gradient_of_gradient(loss, 3, (dy, weights[1], weights[1]))

    def every(x, gamma, beta, dx):
        operands = (x, gamma, beta)
        return (
            jax.grad(loss, (0, 1, 2))(*operands),
            jax.jvp(partial(batch_norm, epsilon=EPSILON), operands, (dx, beta, gamma)),
            jax.grad(second, (0, 1, 2))(*operands),
        )

    operands = (x, gamma, beta, dy)
    spread = placed(spec, *operands)
    compiled = jax.jit(every).lower(*spread).compile()
    agree(compiled(*spread), jax.jit(every)(*operands))
    for operation, size in told(compiled).items():
        assert operation == "all-reduce" or size < x.nbytes / 4


@pytest.mark.covering(1)
@pytest.mark.parametrize("arithmetic", [None, "float32", "float64"])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_sharded_forward_and_backward_are_within_budget(dtype, arithmetic, rng):
    """Without 64 bits, as most have JAX, also where a mean is much larger than the deviation."""
    wide = dtype.itemsize == 8
    if wide and arithmetic == "float32":
        pytest.skip("is refused")
    # What is told is float64, and so is no better than that of such a mean.
    ratio = 1.0 if wide else 1e4
    data = realistic_data(SHAPE, dtype, data_format="NXC", rng=rng, ratio=ratio)
    options = {"epsilon": data.epsilon, "arithmetic": arithmetic}
    judged = {"epsilon": data.epsilon, "data_format": "NXC", "arithmetic": arithmetic}

    def passed(check, function, operands, **more):
        spread = placed(P("d"), *operands)
        compiled = jax.jit(partial(function, **options, **more)).lower(*spread).compile()
        found = tuple(map(np.asarray, compiled(*spread)))
        verdicts = check(*operands, found, **judged, **more)
        assert [each.detail for each in verdicts.values() if not each.passed] == []
        assert set(told(compiled)) == {"all-reduce"}

    with jax.enable_x64(wide):
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
        backward = jax.jit(partial(batch_norm_backward, epsilon=0.0))
        expected = [np.asarray(each) for each in backward(x, dy, mean, variance, gamma)]
        x, dy = placed(P("d"), x, dy)
        found = jax.jit(partial(batch_norm, epsilon=0.0))(x)
        np.testing.assert_array_equal(np.asarray(found[2]), variance)
        for each, other in zip(backward(x, dy, mean, variance, gamma), expected, strict=True):
            assert np.any(other)
            np.testing.assert_allclose(each, other, rtol=1e-5, atol=0)


def test_sharded_backward_with_subnormal_dx_matches_one_device_within_ulp(normal):
    with jax.enable_x64(False):
        x, dy = np.asarray(normal(64, 6), np.float32), np.asarray(normal(64, 6), np.float32)
        gamma, mean = np.full(6, 1e-39, np.float32), np.zeros(6, np.float32)
        backward = jax.jit(partial(batch_norm_backward, epsilon=1e-5))
        one = np.asarray(backward(x, dy, mean, mean + 1, gamma)[0])
        found = np.asarray(backward(*placed(P("d"), x, dy), mean, mean + 1, gamma)[0])
        assert 0 < np.abs(found).max() < np.finfo(np.float32).tiny
        assert np.abs(found.view(np.int32) - one.view(np.int32)).max() <= 1


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
    compiled = mapped.lower(*spread).compile()
    agree(compiled(*spread), mapped(x, gamma, beta, dy), 1e-13)
    assert set(told(compiled)) <= {"all-reduce"}
    # A gradient of what instances share is the same array in all of them.
    one = jax.jit(jax.vmap(partial(batch_norm_backward, epsilon=EPSILON), (None, 0, 0, 0, None)))
    operands = (x[0], dy, beta * gamma, gamma**2, beta)
    cut = P(*spec[1:])
    spread = [placed(cut, x[0], mesh=where.mesh)[0], jax.device_put(dy, where), *operands[2:]]
    agree(one(*spread), one(*operands), 1e-13)


def test_batch_norm_of_unequal_parts_matches_one_device(arrays):
    """Of 4 devices with 6 samples two have none: the padding of their parts is not counted."""
    x, gamma, beta, dy = arrays

    def both(x, gamma, beta, dy):
        y, pull = jax.vjp(lambda *g: batch_norm(*g, epsilon=EPSILON), x[:6], gamma, beta)
        return y, pull((dy[:6], gamma, beta))

    spread = placed(P("d"), x, gamma, beta, dy)
    agree(jax.jit(both)(*spread), jax.jit(both)(x, gamma, beta, dy), 1e-12)
    joined = jax.jit(lambda x: batch_norm(jnp.concatenate([x, x[:3]]), epsilon=EPSILON))
    agree(joined(spread[0]), joined(x), 1e-12)


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

    def both(x, gamma, beta, dy):
        y, pull = jax.vjp(lambda *g: batch_norm(*g, epsilon=EPSILON)[0], x, gamma, beta)
        return y, pull(dy)

    with jax.set_mesh(mesh):
        spread = placed(P("d"), x, gamma, beta, dy, mesh=mesh)
        compiled = jax.jit(both).lower(*spread).compile()
        found = compiled(*spread)
    agree(found, jax.jit(both)(x, gamma, beta, dy), 1e-13)
    assert set(told(compiled)) == {"all-reduce"}


def test_batch_norm_on_one_device_lowers_to_one_kernel_call(arrays):
    """One call of the kernel, also where a process has several devices."""
    x, gamma, beta, _ = arrays
    function = jax.jit(partial(batch_norm, epsilon=EPSILON))
    text = function.lower(x, gamma, beta).as_text()
    assert text.count("stablehlo.custom_call") == text.count(ffi.TARGET) == 1


def test_exported_function_of_sharded_x_matches_one_device(arrays):
    """The sharding rule is Python code of this process, which an exported function cannot call."""
    x, gamma, beta, _ = arrays
    allowed = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    function = jax.jit(partial(batch_norm, epsilon=EPSILON))
    spread = placed(P("d"), x, gamma, beta)
    again = export.deserialize(
        export.export(function, disabled_checks=allowed)(*spread).serialize()
    )
    agree(jax.jit(again.call)(*spread), function(x, gamma, beta), 1e-13)


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
    compiled = step.lower(variables, *spread).compile()
    agree(compiled(variables, *spread), step(variables, x, target), 1e-12)
    assert set(told(compiled)) == {"all-reduce"}


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
