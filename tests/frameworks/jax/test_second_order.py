"""The second order of JAX against the oracle, with and without float64; its memory."""

from __future__ import annotations

import contextlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backnorm.jax
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_double_backward
from backnorm.jax import formulas
from backnorm.options import Options
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64

from .conftest import EPSILON

CASES = [(dtype, wide) for dtype in ELEMENT_TYPES for wide in (True, False)]
CASES.remove((FLOAT64, False))


def with_float64(wide):
    return contextlib.nullcontext() if wide else jax.enable_x64(False)


def layer(rng, dtype, shape, ratio=10.0):
    data = realistic_data(shape, dtype, rng=rng, ratio=ratio)
    ddgamma, ddbeta = rng.standard_normal((2, shape[1])).astype(data.mean.dtype)
    return data, ((rng.standard_normal(shape) + 0.7).astype(dtype), ddgamma, ddbeta)


@pytest.mark.covering(1)
@pytest.mark.parametrize("shape", [(6, 5, 8), (64, 2, 32, 16)], ids=str)
@pytest.mark.parametrize(("dtype", "wide"), CASES, ids=str)
def test_second_order_is_within_budget(dtype, wide, shape, rng):
    data, cotangents = layer(rng, dtype, shape)
    with with_float64(wide):
        beta = jnp.zeros(shape[1], data.gamma.dtype)

        def forward(x, gamma, beta):
            return backnorm.jax.batch_norm(x, gamma, beta, epsilon=EPSILON, axis=1)

        def backward(x, dy, gamma):
            _, pull_back = jax.vjp(lambda *operands: forward(*operands)[0], x, gamma, beta)
            return pull_back(dy)

        inputs = [jnp.asarray(each) for each in (data.x, data.dy, data.gamma)]
        _, mean, variance = map(np.asarray, forward(inputs[0], inputs[2], beta))
        second = jax.jit(lambda inputs, arguments: jax.vjp(backward, *inputs)[1](arguments))
        gradients = tuple(map(np.asarray, second(inputs, cotangents)))
    judge(data, mean, variance, cotangents, gradients, wide=wide, in_parts=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "wide"), CASES, ids=str)
def test_second_order_with_frozen_statistics_is_within_budget(dtype, wide, rng):
    data, cotangents = layer(rng, dtype, (6, 5, 8))
    inputs = data.backward_inputs
    with with_float64(wide):
        options = Options(EPSILON, (1,), training=False)
        second = jax.jit(partial(formulas.second_order, options=options))
        by_x, by_dy, _, _, by_gamma = second(inputs, cotangents)
        gradients = tuple(map(np.asarray, (by_x, by_dy, by_gamma)))
    judge(data, inputs[2], inputs[3], cotangents, gradients, wide=wide, training=False)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("dtype", "wide"), [(FLOAT64, True), (FLOAT32, True), (FLOAT32, False)])
def test_second_order_with_constant_channel_and_tiny_epsilon_matches_oracle(dtype, wide, rng):
    """No float32 holds this epsilon; a variance of 0 contributes nothing to the gradient of x."""
    data, (ddx, ddgamma, ddbeta) = layer(rng, dtype, (6, 5, 8))
    x = data.x.copy()
    x[:, 1] = 3.0
    if dtype == FLOAT32:
        ddx, ddgamma = np.zeros_like(ddx), np.zeros_like(ddgamma)
    with with_float64(wide):

        def backward(x, dy):
            function = partial(backnorm.jax.batch_norm, epsilon=1e-300, axis=1)
            (_, mean, variance), pull_back = jax.vjp(function, x, data.gamma, data.beta)
            return pull_back((dy, jnp.zeros_like(mean), jnp.zeros_like(variance)))

        second = jax.jit(lambda inputs, arguments: jax.vjp(backward, *inputs)[1](arguments))
        by_x, by_dy = map(np.asarray, second((x, data.dy), (ddx, ddgamma, ddbeta)))
    assert np.isfinite(by_x).all()
    expected = backnorm.reference.double_backward(
        x, data.dy, x.mean((0, 2)), x.var((0, 2)), data.gamma, ddx=ddx, ddgamma=ddgamma,
        ddbeta=ddbeta, epsilon=1e-300,
    )  # fmt: skip
    np.testing.assert_allclose(by_x[:, 1], expected.x.hi[:, 1], rtol=1e-12)
    np.testing.assert_allclose(by_dy[:, 1], expected.dy.hi[:, 1], rtol=1e-6)


def judge(data, mean, variance, cotangents, gradients, **options):
    names = dict(zip(("ddx", "ddgamma", "ddbeta"), cotangents, strict=True))
    verdicts = check_double_backward(
        data.x, data.dy, mean, variance, data.gamma, gradients, epsilon=EPSILON, **names, **options
    )
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []


@pytest.mark.covering(1)
@pytest.mark.parametrize(("dtype", "wide"), CASES, ids=str)
@pytest.mark.parametrize("axis", [1, 3])
def test_second_order_keeps_temporary_memory_within_bound(dtype, wide, axis):
    """No memory where elements are of the arithmetic's type; else XLA widens them on a CPU."""
    with with_float64(wide):
        shape = (32, 32, 16, 32)
        x = jnp.ones(shape, dtype)
        channels = jnp.ones(32, formulas.working_type(x.dtype))

        def second(*operands):
            return formulas.second_order(operands[:5], operands[5:], Options(EPSILON, (axis,)))

        operands = (x, x, *[channels] * 3, x, *[channels] * 2)
        measured = jax.jit(second).lower(*operands).compile().memory_analysis()
        arithmetic = np.result_type(float if wide else np.float32)
    beyond = 0 if dtype == arithmetic else 3 * arithmetic.itemsize
    assert measured.temp_size_in_bytes <= beyond * x.size + (1 << 17)
