"""The numbers: against the oracle, against automatic differentiation of the textbook formula."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backnorm.jax
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward
from backnorm.jax import formulas
from backnorm.jax.inverse_std import inverse_std, is_refused
from backnorm.options import Options
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32

from .conftest import EPSILON, SHAPES, agree, gradient_of_gradient, textbook, weighed


def assert_passed(verdicts):
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []


def axis_of(data_format):
    return 1 if data_format == "NCX" else -1


def arrays(values):
    return tuple(np.asarray(value) for value in values)


def backward(*inputs, epsilon, data_format, training):
    gradients = backnorm.jax.batch_norm_backward(
        *inputs, epsilon=epsilon, axis=axis_of(data_format), training=training
    )
    return arrays(gradients)


# XLA takes subnormal numbers for 0, on a CPU.
@pytest.mark.parametrize("by_formulas", [False, True])
@pytest.mark.parametrize("epsilon", [0.0, 1e-45, 1e-300])
def test_backward_with_subnormal_variance_does_not_flush_it_to_zero(epsilon, by_formulas, rng):
    data = realistic_data((6, 5, 8), FLOAT32, rng=rng)
    variance = np.array([1e-40, 1e-45, 3e-39, 0.5, 0.0 if epsilon else 1e-38], np.float32)
    x = (rng.standard_normal(data.x.shape) * np.sqrt(variance[:, None])).astype(np.float32)
    mean = x.mean((0, 2))
    if by_formulas:
        function = jax.jit(partial(formulas.backward, options=Options(epsilon, (1,))))
        by_x, by_gamma, by_beta = function(x, data.dy, mean, variance, data.gamma)
        s = jax.jit(partial(inverse_std, epsilon=epsilon))(variance)
        exact = 1 / np.sqrt(variance.astype(np.float64) + epsilon)
        np.testing.assert_allclose(s, np.minimum(exact, np.finfo(np.float32).max), rtol=1e-6)
        assert not any(np.isnan(each).any() for each in (by_x, by_gamma, by_beta))
    else:
        inputs = (x, data.dy, mean, variance, data.gamma)
        options = {"epsilon": epsilon, "data_format": "NCX", "training": True}
        assert_passed(check_backward(*inputs, backward(*inputs, **options), **options))


def test_is_refused_matches_exact_sum_of_variance_and_epsilon():
    numbers = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, -1e-3, np.nan, np.inf, -np.inf, -1e-40]
    variance = np.array(numbers, np.float32)
    with np.errstate(over="ignore"):
        variance = np.append(variance, np.nextafter(variance, np.float32(0)))
    for epsilon in (0.0, 1e-300, 1e-45, 1e-40, 1e-3, float(np.float32(1e-3)), 1.0):
        found = jax.jit(partial(is_refused, epsilon=epsilon))(variance)
        exact = variance.astype(np.longdouble) + epsilon <= 0
        is_number = ~np.isnan(variance)
        np.testing.assert_array_equal(np.asarray(found)[is_number], exact[is_number])


@pytest.mark.long
@pytest.mark.parametrize(("shape", "axis", "orders"), [(*SHAPES[0], 3), (*SHAPES[2], 2)])
def test_higher_order_derivatives_match_textbook(shape, axis, orders, layer, normal):
    inputs, weights = layer(shape, axis), (normal(*shape), normal(shape[axis]))
    ours = weighed(
        lambda *operands: backnorm.jax.batch_norm(*operands, epsilon=EPSILON, axis=axis), weights
    )
    theirs = weighed(lambda *operands: textbook(*operands, axis=axis), weights)
    for _ in range(orders):
        mine = jax.jit(jax.grad(ours, (0, 1, 2)))(*inputs)
        agree(mine, jax.jit(jax.grad(theirs, (0, 1, 2)))(*inputs))
        again = [normal(*each.shape) for each in inputs]
        ours = gradient_of_gradient(ours, 3, again)
        theirs = gradient_of_gradient(theirs, 3, again)


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_backward_match_formula(training, layer, normal):
    # The arguments are five, and independent: mean and variance are what the caller says.
    x, gamma, _ = layer((6, 5, 4), 1)
    inputs = (x, normal(6, 5, 4), normal(5), normal(5) ** 2 + 0.5, gamma)
    weights = [normal(6, 5, 4), normal(5), normal(5)]

    def by_hand(x, dy, mean, variance, gamma):
        column = (1, -1, 1)
        s = 1.0 / jnp.sqrt(variance + EPSILON)
        c = x - mean.reshape(column)
        dbeta, dgamma = dy.sum((0, 2)), s * (dy * c).sum((0, 2))
        of_sums = dbeta.reshape(column) + c * (s * dgamma).reshape(column)
        dx = dy - (of_sums / 24 if training else 0.0)
        return dx * (gamma * s).reshape(column), dgamma, dbeta

    def ours(*operands):
        return backnorm.jax.batch_norm_backward(
            *operands, epsilon=EPSILON, axis=1, training=training
        )

    def loss(function):
        return lambda *operands: sum(
            jnp.sum(jnp.sin(each) * weight)
            for each, weight in zip(function(*operands), weights, strict=True)
        )

    agree(ours(*inputs), by_hand(*inputs))
    agree(jax.grad(loss(ours), range(5))(*inputs), jax.grad(loss(by_hand), range(5))(*inputs))


@pytest.mark.long
def test_derivatives_of_inference_match_formula(layer, normal):
    x, gamma, beta = layer((6, 5, 4), 1)
    inputs = (x, normal(5), normal(5) ** 2 + 0.5, gamma, beta)
    weight = normal(6, 5, 4)

    def by_hand(x, mean, variance, gamma, beta):
        mean, variance, gamma, beta = (each[:, None] for each in (mean, variance, gamma, beta))
        return gamma * (x - mean) / jnp.sqrt(variance + EPSILON) + beta

    def ours(*operands):
        return backnorm.jax.batch_norm_inference(*operands, epsilon=EPSILON, axis=1)

    def loss(function):
        return lambda *operands: jnp.sum(jnp.sin(function(*operands)) * weight)

    agree(ours(*inputs), by_hand(*inputs))
    agree(jax.grad(loss(ours), range(5))(*inputs), jax.grad(loss(by_hand), range(5))(*inputs))
    again = [normal(*each.shape) for each in inputs]
    second = [gradient_of_gradient(loss(each), 5, again) for each in (ours, by_hand)]
    agree(*(jax.grad(each, range(5))(*inputs) for each in second))


def test_vmap_of_backward_over_no_instances_returns_empty_gradients(layer, normal):
    x, gamma, _ = layer((6, 5, 4), 1)
    backward = partial(backnorm.jax.batch_norm_backward, epsilon=EPSILON, axis=1)
    mapped = jax.vmap(backward, in_axes=(None, 0, None, None, None))
    dx, dgamma, dbeta = mapped(x, normal(0, 6, 5, 4), normal(5), normal(5) ** 2, gamma)
    assert dx.shape == (0, 6, 5, 4)
    assert dgamma.shape == dbeta.shape == (0, 5)


def test_batch_norm_of_rank_1_returns_zeros_with_x_as_mean(normal):
    x = normal(7)
    y, mean, variance = backnorm.jax.batch_norm(x, epsilon=EPSILON)
    agree((y, mean, variance), (jnp.zeros(7), x, jnp.zeros(7)))


def test_invalid_values_and_variances_give_nan_in_their_channel(normal):
    x = np.array(normal(6, 4))
    x[2, 0], x[1, 1] = np.nan, np.inf
    y, mean, variance = backnorm.jax.batch_norm(x, epsilon=EPSILON)
    assert np.isnan(y[:, :2]).all()
    assert np.isfinite(y[:, 2:]).all()
    assert np.isnan(mean[0])
    assert mean[1] == np.inf
    # A variance that no data can have, and one of constant channels without epsilon.
    for shifted in (-1.0, 0.0):
        values = jnp.array([1.0, shifted, 1.0, 1.0])
        operands = (normal(6, 4), normal(6, 4), normal(4), values)
        dx, dgamma, dbeta = backnorm.jax.batch_norm_backward(*operands, epsilon=0.0)
        assert np.isnan(dx[:, 1]).all()
        assert np.isnan(dgamma[1])
        assert np.isfinite(dx[:, [0, 2, 3]]).all()
        assert np.isfinite(dbeta).all()
        y = backnorm.jax.batch_norm_inference(operands[0], normal(4), values, epsilon=0.0)
        assert np.isnan(y[:, 1]).all()
    y, _, variance = backnorm.jax.batch_norm(jnp.ones((5, 2)), epsilon=0.0)
    assert np.isnan(y).all()
    np.testing.assert_array_equal(variance, 0.0)


class TestFormulas:
    """The formula that other platforms run, here on the CPU."""

    @pytest.mark.covering(1)
    @pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
    @pytest.mark.parametrize(("shape", "axis"), SHAPES)
    def test_formulas_match_kernels(self, shape, axis, dtype, layer, normal):
        x, gamma, beta = layer(shape, axis)
        work = formulas.working_type(dtype)
        x, dy = x.astype(dtype), normal(*shape).astype(dtype)
        gamma, beta = gamma.astype(work), beta.astype(work)
        settings, options = {"epsilon": EPSILON}, Options(EPSILON, (axis % len(shape),))
        tolerance = {8: 1e-13, 4: 2e-5, 2: 2e-2}[dtype.itemsize]

        def compiled(function, **flag):
            return jax.jit(partial(function, options=options._replace(**flag)))

        mine = backnorm.jax.batch_norm(x, gamma, beta, axis=axis, **settings)
        agree(compiled(formulas.forward)(x, gamma, beta), mine, tolerance)
        _, mean, variance = mine
        operands = (x, mean, variance, gamma, beta)
        agree(
            compiled(formulas.normalize)(*operands),
            backnorm.jax.batch_norm_inference(*operands, axis=axis, **settings),
            tolerance,
        )
        for training in (True, False):
            operands, flag = (x, dy, mean, variance, gamma), {"training": training}
            agree(
                compiled(formulas.backward, **flag)(*operands),
                backnorm.jax.batch_norm_backward(*operands, axis=axis, **settings, **flag),
                tolerance,
            )

    @pytest.mark.parametrize("ratio", [1e3, 1e5])
    def test_statistics_of_formulas_with_large_mean_match_float64(self, ratio, rng):
        # float32 data far from zero: the sum of their squares would have no digit of the variance.
        x = jnp.asarray(rng.normal(size=(4000, 3)) + ratio, jnp.float32)
        mean, variance = formulas.statistics(x, Options(EPSILON, (1,)))
        exact = np.asarray(x, np.float64)
        np.testing.assert_allclose(mean, exact.mean(0), rtol=2e-7)
        np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5)
