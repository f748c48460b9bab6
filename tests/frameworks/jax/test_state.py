"""The layer as a function of x and its running statistics; masks and groups of `batch_norm`."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.jax import RunningStatistics, batch_norm, batch_norm_inference, batch_norm_with_state
from tests.support.dtypes import ELEMENT_TYPES

from .conftest import EPSILON, agree, weighed

SHAPE, AXIS = (6, 5, 4), 1
HOW = {"epsilon": EPSILON, "axis": AXIS}


@pytest.fixture
def inputs(layer):
    return layer(SHAPE, AXIS)


@pytest.fixture
def state(normal):
    return RunningStatistics(normal(5), normal(5) ** 2 + 0.5)


def test_batch_norm_with_state_updates_statistics_in_training_only(inputs, state):
    y, now = batch_norm_with_state(
        inputs[0], state, *inputs[1:], training=True, momentum=0.8, **HOW
    )
    expected, mean, variance = batch_norm(*inputs, **HOW)
    agree(y, expected)
    agree(now, (0.8 * state.mean + 0.2 * mean, 0.8 * state.variance + 0.2 * variance))
    y, same = batch_norm_with_state(inputs[0], now, *inputs[1:], training=False, **HOW)
    agree(y, batch_norm_inference(inputs[0], *now, *inputs[1:], **HOW))
    agree(same, now)


def test_running_statistics_start_with_zero_mean_and_unit_variance(inputs):
    start = RunningStatistics.start(5, jnp.float64)
    agree(start, (jnp.zeros(5), jnp.ones(5)))
    y, _ = batch_norm_with_state(inputs[0], start, training=False, **HOW)
    agree(y, inputs[0] / np.sqrt(1 + EPSILON))


@pytest.mark.covering(1)
@pytest.mark.parametrize("kept", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_batch_norm_with_state_keeps_types_of_x_and_state(dtype, kept, inputs):
    x, gamma, beta = inputs[0].astype(dtype), *(each.astype(kept) for each in inputs[1:])
    before = RunningStatistics.start(5, kept)

    def step(state, _):
        y, state = batch_norm_with_state(x, state, gamma, beta, training=True, **HOW)
        return state, y

    state, ys = jax.lax.scan(step, before, length=2)
    assert ys.dtype == dtype
    assert {each.dtype for each in state} == {kept}
    y, _ = batch_norm_with_state(x, state, gamma, beta, training=False, **HOW)
    assert y.dtype == dtype


def test_batch_norm_with_state_over_axis_name_matches_whole_batch(inputs, state):
    x, gamma, beta = inputs
    step = partial(batch_norm_with_state, training=True, axis_name="d", **HOW)
    mapped = jax.vmap(step, (0, None, None, None), (0, None), axis_name="d")
    y, now = mapped(x.reshape(3, 2, *SHAPE[1:]), state, gamma, beta)
    whole = batch_norm_with_state(x, state, gamma, beta, training=True, **HOW)
    agree((y.reshape(SHAPE), now), whole)


@jax.jit
def masked_textbook(x, gamma, beta, mask):
    mask = jnp.broadcast_to(mask, x.shape)
    column = (1, -1, 1)
    mean = jnp.mean(x, (0, 2), where=mask)
    variance = jnp.mean((x - mean.reshape(column)) ** 2, (0, 2), where=mask)
    y = (x - mean.reshape(column)) / jnp.sqrt(variance + EPSILON).reshape(column)
    return y * gamma.reshape(column) + beta.reshape(column), mean, variance


@pytest.mark.long
@pytest.mark.parametrize("shape", [(6, 1, 1), (4,), (1, 5, 4), SHAPE])
def test_batch_norm_with_mask_matches_textbook(shape, inputs, normal, rng):
    mask = jnp.asarray(rng.random(shape) < 0.7).at[..., :2].set(True)
    mask = mask.at[0].set(True)
    weights = normal(*SHAPE), normal(5)
    ours = weighed(partial(batch_norm, **HOW, mask=mask), weights)
    theirs = weighed(partial(masked_textbook, mask=mask), weights)
    agree(batch_norm(*inputs, **HOW, mask=mask), masked_textbook(*inputs, mask))
    for transform in (jax.grad, jax.hessian) if shape == SHAPE else (jax.grad,):
        mine, other = (jax.jit(transform(each, (0, 1, 2)))(*inputs) for each in (ours, theirs))
        agree(mine, other, 1e-10)
    several = jnp.stack([mask, jnp.ones_like(mask)])
    found = [
        jax.jit(jax.vmap(function))(several)
        for function in (
            lambda mask: batch_norm(*inputs, **HOW, mask=mask),
            lambda mask: masked_textbook(*inputs, mask),
        )
    ]
    agree(*found)


def over_a_mesh(function, axis_name, in_axes):
    """Return a function of parts, each on a device of its own, as `jax.pmap` has it."""
    mesh = jax.make_mesh((3,), (axis_name,), axis_types=(AxisType.Auto,))
    specs = tuple(P() if axis is None else P(axis_name) for axis in in_axes)

    def of_part(*operands):
        here = [x if axis is None else x[0] for x, axis in zip(operands, in_axes, strict=True)]
        return [each[None] for each in function(*here)]

    return jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=P(axis_name))


@pytest.mark.covering(1)
@pytest.mark.parametrize("mapped", [jax.vmap, jax.pmap, over_a_mesh])
@pytest.mark.parametrize("kept", [(2, 1, 0), (1, 2, 2), (0, 0, 0)], ids=str)
def test_batch_norm_of_masked_parts_matches_whole_batch(mapped, kept, inputs, normal):
    """Each of three devices has two samples, of which a mask keeps some, or none."""
    x, gamma, beta = inputs
    x = x + 3.0
    mask = np.zeros((3, 2, 5, 4), bool)
    for part, number in enumerate(kept):
        mask[part, :number] = True
    mask[:, :, 1, 2:] = False
    parts, masks = x.reshape(3, 2, 5, 4), jnp.asarray(mask)
    whole = masks.reshape(SHAPE)
    options = partial(batch_norm, axis_name="d", **HOW)
    function = mapped(
        lambda x, mask, gamma, beta: options(x, gamma, beta, mask=mask),
        axis_name="d",
        in_axes=(0, 0, None, None),
    )
    y, mean, variance = function(parts, masks, gamma, beta)
    if not any(kept):
        assert all(jnp.isnan(each).all() for each in (y, mean, variance))
        return
    expected, *statistics = batch_norm(x, gamma, beta, mask=whole, **HOW)
    agree(y.reshape(SHAPE), expected)
    for values, value in zip((mean, variance), statistics, strict=True):
        agree(values, jnp.broadcast_to(value, values.shape))
    weights = normal(*SHAPE)

    @jax.jit
    def total(y):
        return jnp.sum(jnp.sin(y.reshape(SHAPE)) * weights)

    def loss(function, of_mapped):
        def of_parts(x, gamma, beta):
            operands = (x.reshape(parts.shape), masks) if of_mapped else (x, whole)
            return total(function(*operands, gamma, beta)[0])

        gradients = jax.grad(of_parts, (0, 1, 2))
        return gradients if mapped is jax.pmap else jax.jit(gradients)

    alone = loss(lambda x, mask, *rest: batch_norm(x, *rest, mask=mask, **HOW), False)
    agree(loss(function, True)(x, gamma, beta), alone(x, gamma, beta), 1e-10)


def test_batch_norm_does_not_depend_on_masked_elements(inputs):
    x, gamma, beta = inputs
    mask = jnp.arange(6).reshape(6, 1, 1) < 4
    y, *statistics = batch_norm(x, gamma, beta, **HOW, mask=mask)
    other, *same = batch_norm(jnp.where(mask, x, jnp.inf), gamma, beta, **HOW, mask=mask)
    agree((other[:4], same), (y[:4], statistics))


def test_masked_statistics_with_large_mean_match_float64(normal):
    x = (normal(64, 3) + 1e4).astype(jnp.float32)
    _, mean, variance = batch_norm(x, epsilon=0.0, mask=jnp.arange(64).reshape(64, 1) < 48)
    exact = np.asarray(x, np.float64)[:48]
    np.testing.assert_allclose(mean, exact.mean(0), rtol=1e-7)
    np.testing.assert_allclose(variance, exact.var(0), rtol=1e-5)


def test_batch_norm_and_state_with_wrong_argument_raise_error_naming_it(inputs, state):
    x, gamma, beta = inputs

    def refused(kind, message, **options):
        with pytest.raises(kind, match=message):
            batch_norm(x, gamma, beta, **{**HOW, **options})

    refused(ArgumentTypeError, "^mask: must be an array; got list", mask=[True])
    refused(ArgumentTypeError, "^mask: must be of bool; got float64", mask=x)
    refused(ArgumentTypeError, "^mask: must be of bool; got int64", mask=np.ones(4, int))
    refused(ArgumentValueError, r"^mask: .*\(6, 5\).*\(6, 5, 4\)", mask=np.ones((6, 5), bool))
    refused(ArgumentValueError, r"^mask: ", mask=np.ones((2, 6, 5, 4), bool))
    refused(ArgumentValueError, r"^axis_index_groups: needs an axis_name", axis_index_groups=[[0]])

    def grouped(groups):
        function = partial(batch_norm, axis_name="d", axis_index_groups=groups, **HOW)
        return jax.vmap(function, (0, None, None), axis_name="d")(x[None], gamma, beta)

    for groups in ([0], "01", [[0.5]], [[True]]):
        with pytest.raises(ArgumentTypeError, match=r"^axis_index_groups: "):
            grouped(groups)

    def of_state(kind, message, state=state, **options):
        operands = {"training": True, **HOW, **options}
        with pytest.raises(kind, match=message):
            batch_norm_with_state(x, state, gamma, beta, **operands)

    of_state(ArgumentTypeError, "^state: .*tuple", state=tuple(state))
    of_state(ArgumentTypeError, "^mean: .*None", state=RunningStatistics(None, beta))
    of_state(ArgumentTypeError, "^training: .*1", training=1)
    of_state(ArgumentValueError, "^momentum: .*1.5", momentum=1.5)
    of_state(ArgumentValueError, "^momentum: .*nan", momentum=float("nan"))
    of_state(ArgumentTypeError, "^momentum: .*str", momentum="1")
    for training in (True, False):
        short = RunningStatistics.start(3)
        of_state(ArgumentValueError, r"^mean: .*3", state=short, training=training)
        whole = RunningStatistics(*(jnp.ones(5, int),) * 2)
        of_state(ArgumentTypeError, r"^mean: .*int64", state=whole, training=training)
    with pytest.raises(ArgumentTypeError, match=r"^channels: "):
        RunningStatistics.start(2.5)
    with pytest.raises(ArgumentValueError, match=r"^channels: .*-1"):
        RunningStatistics.start(-1)
