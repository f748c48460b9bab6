"""Forward mode, alone and together with reverse mode, against the textbook's formula."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import backnorm.jax
from backnorm.jax.ffi import TARGET
from tests.support.dtypes import ELEMENT_TYPES

from .conftest import EPSILON, agree, textbook
from .pairs import AXIS, HOW, PAIRS, SHAPE


def along(function, tangents):
    """Return what computes the results of a function, and their tangents."""
    return lambda *operands: jax.jvp(function, operands, tangents)


def linearized(function, tangents):
    def both(*operands):
        values, linear = jax.linearize(function, *operands)
        back = jax.linear_transpose(linear, *operands)
        return values, linear(*tangents), back(jax.tree.map(jnp.cos, values))

    return both


def every(tangents):
    return tuple(range(len(tangents)))


def tangents_of_gradient(loss, tangents):
    return along(jax.grad(loss, every(tangents)), tangents)


def gradient_of_tangents(loss, tangents):
    return jax.grad(lambda *operands: along(loss, tangents)(*operands)[1], every(tangents))


def by_tangents_too(loss, tangents):
    return jax.grad(lambda *operands: along(loss, operands)(*operands)[1], every(tangents))


def third_by_both(loss, tangents):
    def total(*operands):
        found = tangents_of_gradient(loss, tangents)(*operands)[1]
        return sum(jnp.sum(jnp.sin(each)) for each in found)

    return jax.grad(total, every(tangents))


# Of functions, and of scalar functions.
OF_RESULTS = {
    "jvp": along,
    "linearize": linearized,
    "jacfwd": lambda function, tangents: jax.jacfwd(function, every(tangents)),
    "jvp of jvp": lambda function, tangents: along(along(function, tangents), tangents),
}
OF_LOSSES = {
    "jvp of grad": tangents_of_gradient,
    "grad of jvp": gradient_of_tangents,
    "grad of jvp by tangents, too": by_tangents_too,
    "hessian": lambda loss, tangents: jax.hessian(loss, every(tangents)),
    "jacrev of jacfwd": lambda loss, tangents: jax.jacrev(
        jax.jacfwd(loss, every(tangents)), every(tangents)
    ),
    "grad of jvp of grad": third_by_both,
    "jvp of jvp of jvp": lambda loss, tangents: along(
        along(along(loss, tangents), tangents), tangents
    ),
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("transform", OF_RESULTS)
@pytest.mark.parametrize("name", PAIRS)
def test_forward_mode_of_results_matches_textbook(name, transform, arguments):
    ours, theirs, ranks = PAIRS[name]
    inputs, tangents = arguments(ranks), arguments(ranks)
    mine, other = (OF_RESULTS[transform](each, tangents) for each in (ours, theirs))
    agree(jax.jit(mine)(*inputs), jax.jit(other)(*inputs))


# In every run; the other pairs of a function and a transformation are a sweep's.
OFTEN = {
    "training": OF_LOSSES,
    "residual and relu": ("jvp of grad",),
    "inference": ("jvp of grad", "grad of jvp"),
    "backward, training=True": ("hessian", "grad of jvp"),
    "backward, training=False": ("jvp of grad",),
}


@pytest.mark.parametrize(
    ("name", "transform"),
    [
        # In one of them all derivatives by given statistics take part.
        ("inference", "jvp of grad"),
        *(
            pytest.param(n, t, marks=pytest.mark.long if t in OFTEN[n] else pytest.mark.sweep)
            for n in PAIRS
            for t in OF_LOSSES
            if (n, t) != ("inference", "jvp of grad")
        ),
    ],
)
def test_forward_mode_of_losses_matches_textbook(name, transform, arguments, scalar):
    ours, theirs, ranks = PAIRS[name]
    inputs, tangents = arguments(ranks), arguments(ranks)
    mine, other = (OF_LOSSES[transform](scalar(each), tangents) for each in (ours, theirs))
    agree(jax.jit(mine)(*inputs), jax.jit(other)(*inputs), 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("name", ["training", "inference"])
def test_forward_mode_without_jit_matches_textbook(name, arguments, scalar):
    ours, theirs, ranks = PAIRS[name]
    inputs, tangents = arguments(ranks), arguments(ranks)
    agree(along(ours, tangents)(*inputs), along(theirs, tangents)(*inputs))
    for transform in (tangents_of_gradient, gradient_of_tangents):
        mine, other = (transform(scalar(each), tangents)(*inputs) for each in (ours, theirs))
        agree(mine, other)
        with jax.disable_jit():
            agree(transform(scalar(ours), tangents)(*inputs), other)


def subsets(count, sizes):
    numbers = range(count)
    return [some for size in sizes for some in itertools.combinations(numbers, size)]


ONE = [(n, some) for n, (_, _, ranks) in PAIRS.items() for some in subsets(len(ranks), (1,))]
SEVERAL = [
    (n, some)
    for n, (_, _, ranks) in PAIRS.items()
    for some in subsets(len(ranks), range(2, len(ranks)))
]


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("name", "moved"), [*ONE, *(pytest.param(*each, marks=pytest.mark.sweep) for each in SEVERAL)]
)
def test_forward_mode_along_some_arguments_matches_textbook(name, moved, arguments, scalar):
    ours, theirs, ranks = PAIRS[name]
    inputs, tangents = arguments(ranks), arguments(ranks)

    def of_moved(layer, *some):
        whole = list(inputs)
        for k, each in zip(moved, some, strict=True):
            whole[k] = each
        return layer(*whole)

    some, along_some = (tuple(each[k] for k in moved) for each in (inputs, tangents))
    found = []
    for layer in (ours, theirs):
        function = partial(of_moved, layer)
        both = along(function, along_some), tangents_of_gradient(scalar(function), along_some)
        found.append(jax.jit(lambda *some, both=both: [each(*some) for each in both])(*some))
    agree(*found)


@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_jvp_of_y_has_the_bits_of_backward_or_inference(dtype, arguments):
    """The Jacobian of y in x is symmetric, so its product is the backward pass's; to the bit."""
    x, dx = (each.astype(dtype) for each in arguments((3, 3)))
    narrow = backnorm.jax.formulas.working_type(dtype)
    gamma, dgamma, dbeta = (each.astype(narrow) for each in arguments((1, 1, 1)))
    layer = partial(backnorm.jax.batch_norm, **HOW)
    _, mean, variance = layer(x, gamma)
    (_, _, _), (dy, dmean, dvariance) = jax.jvp(lambda x: layer(x, gamma), (x,), (dx,))
    expected, of_gamma, of_beta = backnorm.jax.batch_norm_backward(
        x, dx, mean, variance, gamma, **HOW
    )
    np.testing.assert_array_equal(dy, expected)
    count, s = x.size // SHAPE[AXIS], 1 / np.sqrt(np.asarray(variance, np.float64) + EPSILON)
    agree((dmean, dvariance), (of_beta / count, (2 * of_gamma / count / s).astype(narrow)), 1e-6)
    both = gamma, jnp.zeros_like(gamma)
    _, (dy, dmean, dvariance) = jax.jvp(partial(layer, x), both, (dgamma, dbeta))
    np.testing.assert_array_equal(
        dy, backnorm.jax.batch_norm_inference(x, mean, variance, dgamma, dbeta, **HOW)
    )
    np.testing.assert_array_equal((dmean, dvariance), 0.0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16], ids=str)
def test_jvp_of_backward_in_16_bits_equals_rounded_float64(dtype, training, arguments):
    x, dy, dx, ddy = (each.astype(dtype) for each in arguments((3, 3, 3, 3)))
    mean, variance, gamma, *moved = (each.astype(jnp.float32) for each in arguments((1,) * 6))
    primals, tangents = (x, dy, mean, variance, gamma), (dx, ddy, *moved)
    function = partial(backnorm.jax.batch_norm_backward, **HOW, training=training)
    wide = [tuple(each.astype(jnp.float64) for each in group) for group in (primals, tangents)]
    expected = jax.jvp(function, *wide)[1]
    found = jax.jvp(function, primals, tangents)[1]
    for mine, exact in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, exact.astype(mine.dtype))


def calls(function, *operands):
    return jax.jit(function).lower(*operands).as_text().count(f"custom_call @{TARGET}")


def test_derivatives_lower_to_two_or_three_kernel_calls(arguments, scalar):
    x, gamma, beta = inputs = arguments((3, 1, 1))
    layer = partial(backnorm.jax.batch_norm, **HOW)
    assert calls(lambda x, dx: jax.jvp(lambda x: layer(x, gamma, beta), (x,), (dx,)), x, x) == 2
    assert calls(lambda *t: jax.jvp(layer, inputs, t), *inputs) == 3
    assert calls(jax.grad(scalar(layer), (0, 1, 2)), *inputs) == 2
    assert calls(jax.linearize(layer, *inputs)[1], *inputs) == 2


def test_jvp_with_constant_channel_and_epsilon_zero_keeps_other_channels_finite(normal):
    """Tangents of the constant channel may be NaN, as by the textbook's formula; no others are."""
    x = normal(4, 3).at[:, 1].set(2.0)
    layer = partial(backnorm.jax.batch_norm, epsilon=0.0)
    (_, _, _), (dy, dmean, _) = jax.jvp(layer, (x,), (normal(4, 3),))
    assert np.isfinite(np.asarray(dy)[:, [0, 2]]).all()
    assert np.isfinite(np.asarray(dmean)[[0, 2]]).all()


# A batch of eight on four devices.
WHOLE, PARTS = (8, 5, 4), (4, 2, 5, 4)


@pytest.mark.long
class TestDevices:
    @pytest.fixture
    def arrays(self, layer, normal):
        inputs = layer(WHOLE, AXIS)
        return inputs, tuple(normal(*each.shape) for each in inputs), normal(*WHOLE)

    def functions(self, w, name):
        def ours(*operands):
            return backnorm.jax.batch_norm(*operands, **HOW, axis_name=name)

        def theirs(*operands):
            return textbook(*operands, axis=AXIS, axis_name=name)

        def loss(layer):
            def function(*operands):
                y, mean, variance = layer(*operands)
                return jnp.sum(jnp.sin(y) * w) + jnp.sum(jnp.cos(mean) * variance)

            return function

        return [
            lambda inputs, tangents, layer=layer: (
                jax.jvp(layer, inputs, tangents),
                jax.jvp(jax.grad(loss(layer), (0, 1, 2)), inputs, tangents),
                gradient_of_tangents(loss(layer), tangents)(*inputs),
            )
            for layer in (ours, theirs)
        ]

    @pytest.mark.parametrize("mapped", [jax.pmap, jax.vmap])
    def test_forward_mode_in_pmap_or_vmap_with_axis_name_matches_textbook(self, mapped, arrays):
        inputs, tangents, w = arrays
        operands = [(x.reshape(PARTS), gamma, beta) for x, gamma, beta in (inputs, tangents)]

        def both(x, dx, w):
            rest, along_rest = inputs[1:], tangents[1:]
            return [f((x, *rest), (dx, *along_rest)) for f in self.functions(w, "d")]

        found = jax.jit(mapped(both, axis_name="d"))(
            operands[0][0], operands[1][0], w.reshape(PARTS)
        )
        agree(*found)

    @pytest.mark.parametrize("checked", [True, False])
    def test_forward_mode_within_shard_map_matches_textbook(self, checked, arrays):
        inputs, tangents, w = arrays
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        specs = (P("d"), P(), P())
        shared = partial(jax.shard_map, mesh=mesh, check_vma=checked)

        def within(k):
            def part(inputs, tangents, w):
                found = self.functions(w, "d")[k](inputs, tangents)
                # What is a device's own is brought together by the caller.
                return jax.tree.map(lambda each: each[None], found)

            return shared(part, in_specs=(specs, specs, P("d")), out_specs=P("d"))

        agree(*(jax.jit(within(k))(inputs, tangents, w) for k in (0, 1)))

    def test_forward_mode_of_shard_map_matches_textbook(self, arrays):
        inputs, tangents, w = arrays
        mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
        specs = (P("d"), P(), P())

        def whole(layer):
            return jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=specs)

        def ours(*operands):
            return backnorm.jax.batch_norm(*operands, **HOW, axis_name="d")

        def total(layer):
            def loss(*operands):
                y, mean, variance = layer(*operands)
                return jnp.sum(jnp.sin(y) * w) + jnp.sum(jnp.cos(mean) * variance)

            return loss

        layers = whole(ours), partial(textbook, axis=AXIS)
        agree(*(jax.jit(along(layer, tangents))(*inputs) for layer in layers))
        agree(*(
            jax.jit(tangents_of_gradient(total(layer), tangents))(*inputs) for layer in layers
        ))  # fmt: skip
