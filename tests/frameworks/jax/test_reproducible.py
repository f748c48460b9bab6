"""Reproducible sums: derivatives, refusals, and what is lowered; `test_contract` has their bits."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backnorm.errors import ArgumentValueError
from backnorm.jax import batch_norm, batch_norm_backward, ffi

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


def test_reproducible_on_one_device_lowers_to_one_kernel_call():
    x, _, gamma, beta = data(np.float32)
    text = jax.jit(partial(batch_norm, **HOW)).lower(x, gamma, beta).as_text()
    assert len(re.findall(ffi.TARGET, text)) == 1
