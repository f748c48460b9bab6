"""Our functions where programs of JAX have them: every mapping, rematerialisation, control flow."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.ad_checkpoint import checkpoint_name

from backnorm.jax.ffi import TARGET

from .conftest import agree
from .one_layer import SHAPE, ours, theirs
from .pairs import PAIRS

pytestmark = pytest.mark.long


def mappings():
    """Every choice of mapped arguments of every function, one of them along a later axis."""
    for name, (_, _, ranks) in PAIRS.items():
        for chosen in itertools.product((False, True), repeat=len(ranks)):
            if any(chosen):
                # The place of the mapped axis goes round.
                axes = [k % (rank + 1) for k, rank in enumerate(ranks)]
                axes = [
                    axis if is_mapped else None
                    for axis, is_mapped in zip(axes, chosen, strict=True)
                ]
                rare = (
                    len(ranks) == 5 and sum(chosen) not in (1, 5) and sum(chosen) != len(name) % 5
                )
                marks = [pytest.mark.sweep] if rare else []
                yield pytest.param(name, tuple(axes), marks=marks, id=f"{name}, {axes}")


@pytest.mark.parametrize(("name", "axes"), list(mappings()))
def test_vmap_of_each_choice_of_arguments_matches_textbook(name, axes, arguments, scalar, normal):
    mine, other, ranks = PAIRS[name]
    arrays = [
        each if axis is None else jnp.stack([each, each + normal(*each.shape) ** 2], axis)
        for each, axis in zip(arguments(ranks), axes, strict=True)
    ]
    agree(jax.vmap(mine, axes)(*arrays), jax.vmap(other, axes)(*arrays))
    # Mapped gradients, and gradients of what is mapped.
    every = tuple(range(len(ranks)))
    found = []
    for layer in (mine, other):
        loss = scalar(layer)
        each = jax.vmap(jax.grad(loss, every), axes)
        whole = jax.grad(lambda *a, loss=loss: jnp.sum(jnp.sin(jax.vmap(loss, axes)(*a))), every)
        found.append(jax.jit(lambda *a, f=each, g=whole: (f(*a), g(*a)))(*arrays))
    # The sine of a square of sums enlarges what they are rounded by.
    agree(*found, 1e-9)


@pytest.mark.parametrize(
    "policy",
    [
        None,
        jax.checkpoint_policies.everything_saveable,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.save_only_these_names("y"),
    ],
)
def test_checkpoint_with_policy_matches_textbook(policy, inputs, normal):
    weight = normal(*SHAPE)
    found = []
    for layer in (ours, theirs):

        @partial(jax.checkpoint, policy=policy)
        def block(x, gamma, beta, layer=layer):
            y, mean, variance = layer(x @ jnp.eye(4), gamma, beta)
            return jnp.sin(checkpoint_name(y, "y")) * jnp.sum(mean * variance)

        def loss(*operands, block=block):
            return jnp.sum(block(*operands) * weight)

        gradient = jax.grad(loss, (0, 1, 2))
        found.append(jax.jit(lambda *g, f=gradient: (f(*g), jax.jvp(f, g, g)))(*inputs))
    agree(*found)


def test_checkpoint_policy_determines_number_of_forward_calls(inputs):
    def calls(policy):
        def loss(*operands):
            y, _, _ = jax.checkpoint(ours, policy=policy)(*operands)
            return jnp.sum(jnp.sin(y) * y)

        return str(jax.make_jaxpr(jax.grad(loss))(*inputs)).count("backnorm_forward[")

    # The backward pass wants mean and variance, and computes them again if they are not kept.
    assert calls(jax.checkpoint_policies.everything_saveable) == 1
    assert calls(jax.checkpoint_policies.nothing_saveable) == 2


class TestOtherRules:
    def test_custom_vjp_around_batch_norm_matches_textbook(self, inputs, pair):
        found = []
        for loss in pair:
            function = jax.custom_vjp(loss)
            function.defvjp(
                lambda *g, loss=loss: jax.vjp(loss, *g),
                lambda pull, ct: tuple(2.0 * each for each in pull(ct)),
            )
            found.append(jax.jit(jax.grad(function, (0, 1, 2)))(*inputs))
        agree(*found)

    def test_custom_jvp_around_batch_norm_matches_textbook(self, inputs, pair):
        found = []
        for loss in pair:
            function = jax.custom_jvp(loss)
            function.defjvp(
                lambda p, t, loss=loss: jax.jvp(loss, p, tuple(3.0 * each for each in t))
            )
            gradient = jax.grad(function, (0, 1, 2))
            found.append((gradient(*inputs), jax.jvp(gradient, inputs, inputs)))
        agree(*found)

    def test_batch_norm_with_custom_jvp_activation_matches_textbook(self, inputs):
        @jax.custom_jvp
        def activation(x):
            return jnp.maximum(x, 0.0)

        activation.defjvps(lambda t, y, x: jnp.where(x > 0, t, 0.1 * t))
        found = []
        for layer in (ours, theirs):

            def loss(x, gamma, beta, layer=layer):
                return jnp.sum(activation(layer(activation(x), gamma, beta)[0]) ** 3)

            found.append(jax.grad(loss, (0, 1, 2))(*inputs))
        agree(*found)


class TestControlFlow:
    def test_jvp_of_while_loop_matches_textbook(self, inputs):
        found = []
        for layer in (ours, theirs):

            def run(x, gamma, beta, layer=layer):
                def body(state):
                    k, x = state
                    return k + 1, jnp.tanh(layer(x, gamma, beta)[0]) + x

                return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, x))[1]

            # Forward mode alone goes through a loop whose length is not known.
            found.append(jax.jit(lambda *g, f=run: jax.jvp(f, g, g))(*inputs))
        agree(*found)

    @pytest.mark.parametrize("is_first", [True, False])
    def test_derivatives_of_cond_match_textbook(self, is_first, inputs):
        found = []
        for layer in (ours, theirs):

            def loss(which, x, gamma, beta, layer=layer):
                y = jax.lax.cond(
                    which, lambda x: layer(x, gamma, beta)[0], lambda x: layer(x, beta, beta)[0], x
                )
                return jnp.sum(jnp.sin(y) * jnp.cos(x))

            gradient = jax.grad(loss, (1, 2, 3))
            found.append(jax.jit(lambda *g, f=gradient: (f(*g), jax.jvp(
                partial(f, g[0]), g[1:], g[1:])))(is_first, *inputs))  # fmt: skip
        agree(*found)


def test_gradient_with_donated_x_matches_textbook_and_deletes_x(inputs):
    expected = jax.tree.map(np.asarray, jax.grad(lambda *g: jnp.sum(theirs(*g)[0] ** 3))(*inputs))
    step = jax.jit(jax.grad(lambda *g: jnp.sum(ours(*g)[0] ** 3)), donate_argnums=0)
    x = inputs[0].copy()
    agree(step(x, *inputs[1:]), expected)
    assert x.is_deleted()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_derivatives_in_narrow_types_match_float64_textbook(dtype, inputs, normal):
    """The arguments are exact in 16 bits; each sum has many terms, each rounded once."""
    x, w = (each.astype(dtype) for each in (inputs[0], normal(*SHAPE)))
    gamma, beta = (each.astype(jnp.float32) for each in inputs[1:])
    found = []
    for layer, operands in ((ours, (x, gamma, beta)), (theirs, [
        each.astype(jnp.float64) for each in (x, gamma, beta)
    ])):  # fmt: skip

        def loss(*g, layer=layer):
            return jnp.sum(layer(*g)[0].astype(jnp.float64) * w)

        mapped = jax.vmap(jax.grad(loss, (0, 1, 2)), (None, 0, None))
        several = (operands[0], jnp.stack([operands[1], 2 * operands[1]]), operands[2])
        tangents = jax.jvp(
            lambda x, g=operands, layer=layer: layer(x, *g[1:]), operands[:1], operands[:1]
        )
        found.append((tangents, mapped(*several)))
    assert found[0][0][0][0].dtype == dtype
    narrow = float(jnp.finfo(dtype).eps)
    agree(
        *(jax.tree.map(lambda each: each.astype(jnp.float64), each) for each in found), 8 * narrow
    )


def test_derivatives_of_exported_function_match_textbook(inputs, pair):
    allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = export.export(jax.jit(pair[0]), disabled_checks=allowed)(*inputs)
    again = export.deserialize(exported.serialize(vjp_order=2))
    mine, other = (jax.grad(each, (0, 1, 2)) for each in (again.call, pair[1]))
    agree(mine(*inputs), other(*inputs))

    def second(first):
        return jax.grad(lambda x: jnp.sum(jnp.sin(first(x, *inputs[1:])[0])))

    agree(second(mine)(inputs[0]), second(other)(inputs[0]))


def test_exported_jvp_matches_textbook(inputs):
    allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
    function = jax.jit(lambda *g: jax.jvp(ours, g, g))
    exported = export.export(function, disabled_checks=allowed)(*inputs)
    again = export.deserialize(exported.serialize())
    agree(again.call(*inputs), jax.jvp(theirs, inputs, inputs))
