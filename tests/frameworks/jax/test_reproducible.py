"""Reproducible sums: the bits of NumPy's operators, on one CPU device."""

from __future__ import annotations

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import backnorm
import backnorm.jax.linen
import backnorm.jax.nnx
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax import batch_norm, batch_norm_backward, batch_norm_with_state, ffi
from backnorm.jax.running import RunningStatistics
from tests.support.dtypes import ELEMENT_TYPES

HOW = {"epsilon": 1e-5, "reproducible": True}
SHAPE, CHANNELS = (12, 4, 5, 8), 8


def data(dtype, shape=SHAPE, seed=0):
    """Return x, dy, gamma and beta, of which sums depend on their order."""
    rng = np.random.default_rng(seed)
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    scale = np.exp2(rng.integers(-6, 6, shape[-1]))
    x = ((rng.standard_normal(shape) + 1) * scale).astype(dtype)
    dy = (rng.standard_normal(shape) * np.exp2(rng.integers(-9, 9, shape))).astype(dtype)
    gamma, beta = rng.standard_normal((2, shape[-1])).astype(wide)
    return x, dy, gamma, beta


def by_numpy(x, dy, gamma, beta, axis=-1, **more):
    """Return y, mean, variance, dx, dgamma and dbeta of the operators on arrays."""
    options = HOW | {"data_format": (axis % x.ndim,)} | more
    y, mean, variance = backnorm.batch_norm_forward(x, gamma, beta, **options)
    return y, mean, variance, *backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)


def both(x, dy, gamma, beta, **more):
    """Return the same of the functions on JAX's arrays, the backward pass by `jax.vjp`."""
    options = HOW | more
    y, pull, (mean, variance) = jax.vjp(
        lambda *operands: (lambda y, *others: (y, others))(*batch_norm(*operands, **options)),
        x, gamma, beta, has_aux=True,
    )  # fmt: skip
    dx, dgamma, dbeta = pull(dy)
    return y, mean, variance, dx, dgamma, dbeta


def differences(found, expected):
    """Return which results do not have the same bits, a sign of zero included."""
    different = []
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        one, other = (np.ascontiguousarray(each) for each in (one, other))
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.tobytes() != other.tobytes():
            different.append(k)
    return different


@contextlib.contextmanager
def width(dtype):
    """Have JAX without 64 bits for all but elements of that type."""
    with jax.enable_x64(np.dtype(dtype) == np.float64):
        yield


@pytest.mark.covering(1)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_reproducible_on_one_device_has_the_bits_of_numpy_functions(dtype, x64):
    if dtype.itemsize == 8 and not x64:
        pytest.skip("there are none")
    x, dy, gamma, beta = data(dtype)
    with jax.enable_x64(x64):
        for axis in (-1, 0, 2):
            operands = [np.ascontiguousarray(np.moveaxis(each, -1, axis)) for each in (x, dy)]
            found = both(*operands, gamma, beta, axis=axis)
            assert differences(found, by_numpy(*operands, gamma, beta, axis)) == []
        # And in any layout.
        back = [np.moveaxis(np.asarray(each), 2, -1) if each.ndim > 1 else each for each in found]
        assert differences(back, by_numpy(x, dy, gamma, beta)) == []
        for more in ({"arithmetic": "float64"}, {"training": False}):
            _, mean, variance, *_ = by_numpy(x, dy, gamma, beta)
            operands = (x, dy, mean, variance, gamma)
            found = batch_norm_backward(*operands, **HOW, **more)
            expected = backnorm.batch_norm_backward(*operands, **HOW, data_format="NXC", **more)
            assert differences(found, expected) == []


def test_plain_sums_depend_on_the_order_of_samples():
    """The tests here can fail: without `reproducible` the bits of the statistics differ."""
    different = set()
    for seed in range(5):
        x, dy, gamma, beta = data(np.float64, seed=seed)
        order = np.random.default_rng(seed).permutation(12)
        found = jax.jit(partial(both, reproducible=False))(x[order], dy[order], gamma, beta)
        y, mean, variance, dx, *sums = both(x, dy, gamma, beta, reproducible=False)
        expected = y[order], mean, variance, dx[order], *sums
        different |= set(differences(found, expected))
    assert different >= {0, 1, 2, 3, 4}


def test_reproducible_with_permuted_samples_has_the_same_bits():
    x, dy, gamma, beta = data(np.float32)
    order = np.random.default_rng(1).permutation(12)
    y, mean, variance, dx, dgamma, dbeta = by_numpy(x, dy, gamma, beta)
    expected = y[order], mean, variance, dx[order], dgamma, dbeta
    assert differences(jax.jit(both)(x[order], dy[order], gamma, beta), expected) == []


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(3))
def test_reproducible_with_extreme_or_non_finite_values_has_the_bits_of_numpy(dtype, seed):
    """Bins of different heights; subnormal numbers; NaN and infinities."""
    rng = np.random.default_rng(seed)
    x, dy, gamma, beta = data(dtype, (12, 40, 24), seed)
    limits = np.finfo(dtype)
    for each in (x, dy):
        each *= np.exp2(rng.integers(-60, 60, (12, 1, 24))).astype(dtype)
        each[:, :, 1] = rng.choice(np.array([0.0, -0.0, limits.smallest_subnormal], dtype))
        each[:, :, 2] = limits.tiny * rng.random((12, 40))
        each[:, :, 3] = 0.0
        each[rng.integers(12), 0, 4:8] = [np.nan, np.inf, -np.inf, limits.max]
        each[rng.integers(12), 1, 6] = np.inf
    with width(dtype), np.errstate(all="ignore"):
        # NaN has many patterns.
        found, expected = (
            [np.where(np.isnan(each), np.array(np.nan, dtype), each) for each in results]
            for results in (
                jax.jit(both)(x, dy, gamma, beta),
                by_numpy(x, dy, gamma, beta),
            )
        )
        assert differences(found, expected) == []


def test_reproducible_in_vmap_has_the_bits_of_numpy_functions():
    pairs = zip(data(np.float32), data(np.float32, seed=1), strict=True)
    x, dy, *_ = (np.stack(each) for each in pairs)
    gamma, beta = data(np.float32)[2:]
    expected = [by_numpy(*each, gamma, beta) for each in zip(x, dy, strict=True)]
    mapped = jax.vmap(partial(batch_norm, **HOW), (0, None, None))
    backward = jax.vmap(partial(batch_norm_backward, **HOW), (0, 0, 0, 0, None))
    y, mean, variance, *gradients = (np.stack(each) for each in zip(*expected, strict=True))
    assert differences(jax.jit(mapped)(x, gamma, beta), (y, mean, variance)) == []
    assert differences(jax.jit(backward)(x, dy, mean, variance, gamma), gradients) == []


def test_reproducible_gradients_of_loss_have_the_bits_of_numpy_functions():
    """Of a loss in y alone; a residual block in float32 around the layer."""
    x, dy, gamma, beta = data(np.float32)

    def loss(x, gamma, beta, dy):
        return jnp.sum(batch_norm(x, gamma, beta, **HOW)[0] * dy)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))
    expected = by_numpy(x, dy, gamma, beta)[3:]
    assert differences(gradients(x, gamma, beta, dy), expected) == []
    assert differences(jax.jit(jax.checkpoint(gradients))(x, gamma, beta, dy), expected) == []


def test_reproducible_jvp_and_second_order_match_plain_within_rounding():
    """Forward mode and the second order, of which the bits are not promised."""
    x, dy, gamma, beta = data(np.float64, (6, 3, 4))

    def every(reproducible):
        def function(*operands):
            return batch_norm(*operands, epsilon=1e-5, reproducible=reproducible)

        def loss(*operands):
            return jnp.sum(function(*operands)[0] ** 3 * dy)

        def slope(*operands):
            return sum(jnp.sum(jnp.sin(g)) for g in jax.grad(loss, (0, 1, 2))(*operands))

        operands = (x, gamma, beta)
        return jax.jvp(function, operands, (dy, beta, gamma)), jax.grad(slope, (0, 1, 2))(*operands)

    found, expected = (jax.tree.leaves(jax.jit(every, static_argnums=0)(r)) for r in (True, False))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9 * np.abs(other).max())


def test_batch_norm_with_state_reproducible_has_the_bits_of_the_function():
    x, _, gamma, beta = data(np.float32)
    state = RunningStatistics.start(CHANNELS)
    order = np.random.default_rng(1).permutation(12)
    function = partial(batch_norm_with_state, training=True, **HOW)
    y, after = function(x[order], state, gamma, beta)
    expected, same = function(x, state, gamma, beta)
    assert differences([y, *after], [expected[order], *same]) == []
    with pytest.raises(ArgumentTypeError, match=r"^reproducible: "):
        batch_norm_with_state(x, state, training=False, epsilon=1e-5, reproducible="yes")


def test_reproducible_flax_layers_have_the_bits_of_numpy_functions():
    x, dy, *_ = data(np.float32)
    layer = backnorm.jax.linen.BatchNorm(use_running_average=False, reproducible=True)
    assert isinstance(layer, linen.BatchNorm)
    variables = layer.init(jax.random.key(0), x)

    @jax.jit
    def by_linen(x, dy):
        def loss(params, x):
            y, _ = layer.apply({**variables, "params": params}, x, mutable=["batch_stats"])
            return jnp.sum(y * dy), y

        return jax.grad(loss, (0, 1), has_aux=True)(variables["params"], x)

    @nnx.jit
    def by_nnx(x, dy):
        layer = backnorm.jax.nnx.BatchNorm(8, rngs=nnx.Rngs(0), reproducible=True)
        return nnx.grad(lambda layer, x: jnp.sum(layer(x) * dy), argnums=(0, 1))(layer, x)

    ones, zeros = np.ones(8, np.float32), np.zeros(8, np.float32)
    y, *_, dx, dgamma, dbeta = by_numpy(x, dy, ones, zeros)
    for function in (by_linen, by_nnx):
        found = [np.asarray(each) for each in jax.tree.leaves(function(x, dy))]
        expected = [dbeta, dgamma, dx, y][: len(found)]
        assert differences(found, expected) == []


class TestRefusals:
    def test_reproducible_with_mapped_axis_name_is_rejected(self):
        x = np.ones((4, 3, 2), np.float32)
        for mapped in (partial(jax.vmap, axis_name="i"), partial(jax.pmap, axis_name="i")):
            with pytest.raises(ArgumentValueError, match=r"^reproducible: .*axis_name"):
                mapped(lambda x: batch_norm(x, axis_name="i", **HOW))(x)

    def test_reproducible_with_mask_is_rejected(self):
        x = np.ones((4, 3), np.float32)
        with pytest.raises(ArgumentValueError, match=r"^reproducible: .*mask"):
            batch_norm(x, mask=x > 0, **HOW)

    @pytest.mark.parametrize("wrong", ["yes", 2, None, np.float32(1)])
    def test_reproducible_rejects_other_types_than_bool(self, wrong):
        x, dy, gamma, _ = data(np.float32)
        with pytest.raises(ArgumentTypeError, match=r"^reproducible: "):
            batch_norm(x, epsilon=1e-5, reproducible=wrong)
        with pytest.raises(ArgumentTypeError, match=r"^reproducible: "):
            batch_norm_backward(x, dy, gamma, gamma, epsilon=1e-5, reproducible=wrong)

    @pytest.mark.parametrize("platform", ["cuda", "tpu"])
    def test_reproducible_on_other_platform_than_cpu_is_rejected(self, platform):
        x, dy, gamma, _ = data(np.float32)
        traced = jax.jit(partial(batch_norm, **HOW)).trace(x)
        with pytest.raises(ArgumentValueError, match=r"^reproducible: .*one CPU device"):
            traced.lower(lowering_platforms=(platform,))
        traced = jax.jit(partial(batch_norm_backward, **HOW)).trace(x, dy, gamma, gamma)
        with pytest.raises(ArgumentValueError, match=r"^reproducible: .*one CPU device"):
            traced.lower(lowering_platforms=(platform,))

    def test_reproducible_with_symbolic_shape_is_rejected(self):
        (size,) = jax.export.symbolic_shape("n")
        kind = jax.ShapeDtypeStruct((size, 3), np.float32)
        with pytest.raises(ArgumentValueError, match=r"^reproducible: .*known"):
            jax.export.export(jax.jit(partial(batch_norm, **HOW)))(kind)

    def test_reproducible_with_too_many_elements_is_rejected(self):
        kind = jax.ShapeDtypeStruct((1 << 16, 1 << 16, 1), np.float32)
        with pytest.raises(ArgumentValueError, match=r"^x: has more elements"):
            jax.eval_shape(partial(batch_norm, **HOW), kind)


def test_reproducible_of_empty_batch_returns_zero_statistics():
    x = np.ones((0, 3), np.float32)
    y, mean, variance = batch_norm(x, **HOW)
    assert y.shape == (0, 3)
    assert not np.any([mean, variance])


def test_reproducible_on_one_device_lowers_to_one_kernel_call():
    x, _, gamma, beta = data(np.float32)
    text = jax.jit(partial(batch_norm, **HOW)).lower(x, gamma, beta).as_text()
    assert len(re.findall(ffi.TARGET, text)) == 1
