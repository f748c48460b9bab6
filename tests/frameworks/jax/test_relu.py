"""A ReLU, and an addition before it, in the pass of the normalisation."""

from __future__ import annotations

from functools import partial

import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import backnorm.jax.linen
import backnorm.jax.nnx
from backnorm import Activation
from backnorm import jax as bn
from backnorm.errors import ArgumentValueError
from backnorm.jax.ffi import TARGET

from .conftest import EPSILON, SHAPES, agree, gradient_of_gradient, textbook, weighed

ADDED = pytest.mark.parametrize("added", [False, True], ids=["alone", "residual"])


def ours(x, gamma, beta, residual=None, activation="relu", **options):
    options |= {"activation": activation, "residual": residual}
    return bn.batch_norm(x, gamma, beta, epsilon=EPSILON, **options)


@partial(jax.jit, static_argnames="axis")
def composed(x, gamma, beta, residual=None, axis=-1):
    y, *statistics = textbook(x, gamma, beta, axis=axis)
    return jax.nn.relu(y if residual is None else y + residual), *statistics


@pytest.fixture
def operands(layer, normal):
    """Return a function that makes x, gamma and beta, and a residual."""

    def make(shape, axis, added):
        return (*layer(shape, axis), normal(*shape)) if added else layer(shape, axis)

    return make


@pytest.mark.covering(0)
@ADDED
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_batch_norm_with_relu_matches_composed_values_and_derivatives(
    shape, axis, added, normal, operands
):
    arguments = operands(shape, axis, added)
    weights = normal(*shape), normal(shape[axis])
    every = tuple(range(len(arguments)))
    tangents = tuple(normal(*each.shape) for each in arguments)

    def found(function):
        def alone(k, *arguments):
            # One that moves alone: all others have no tangent.
            def moved(each):
                return function(*arguments[:k], each, *arguments[k + 1 :])

            return jax.jvp(moved, arguments[k : k + 1], tangents[k : k + 1])

        def of_all(*arguments):
            gradients = jax.grad(weighed(function, weights), every)(*arguments)
            both = jax.jvp(function, arguments, tangents)
            return gradients, both, [alone(k, *arguments) for k in every]

        return jax.jit(of_all)(*arguments)

    agree(*(found(partial(each, axis=axis)) for each in (ours, composed)))
    agree(ours(*arguments, axis=axis), composed(*arguments, axis=axis))


@pytest.mark.covering(0)
@ADDED
def test_second_order_with_relu_matches_composed(added, normal, operands):
    arguments = operands((6, 3, 4, 5), -1, added)
    weights = normal(6, 3, 4, 5), normal(5)
    again = [normal(*each.shape) for each in arguments]
    seconds = [
        gradient_of_gradient(weighed(function, weights), len(arguments), again)
        for function in (ours, composed)
    ]
    every = tuple(range(len(arguments)))
    agree(*(jax.jit(jax.grad(second, every))(*arguments) for second in seconds))


@ADDED
def test_vmap_with_relu_matches_composed(added, operands):
    x, gamma, beta, *residual = operands((3, 6, 4, 5), -1, added)

    def mapped(function):
        if added:
            # What all instances share, too.
            shared = jax.vmap(lambda x: function(x, gamma, beta, residual[0][0]))(x)
            return shared, jax.vmap(lambda x, r: function(x, gamma, beta, r))(x, residual[0])
        return jax.vmap(lambda x: function(x, gamma, beta))(x)

    agree(mapped(ours), mapped(composed))


def test_relu_with_residual_compiles_to_one_kernel_call(operands):
    x, gamma, beta, residual = operands((6, 3, 4, 5), -1, True)
    compiled = jax.jit(ours).lower(x, gamma, beta, residual).compile().as_text()
    assert compiled.count(f'custom_call_target="{TARGET}"') == 1
    assert "maximum" not in compiled


def test_relu_of_nan_and_infinity_returns_nan_where_composed_does(normal):
    x = normal(4, 3).at[0, 0].set(jnp.nan).at[1, 1].set(jnp.inf)
    gamma = jnp.ones(3)
    agree_as_bits = [np.asarray(f(x, gamma, gamma)[0]) for f in (ours, composed)]
    np.testing.assert_array_equal(*map(np.isnan, agree_as_bits))


@pytest.mark.parametrize("settings", [{"reproducible": True}, {"mask": True}], ids=str)
def test_relu_with_mask_or_reproducible_matches_separate_relu(settings, operands):
    x, gamma, beta, residual = operands((6, 3, 4, 5), -1, True)
    settings = {name: (x > 0 if name == "mask" else value) for name, value in settings.items()}
    y, *_ = bn.batch_norm(x, gamma, beta, epsilon=EPSILON, **settings)
    agree(ours(x, gamma, beta, residual, **settings)[0], jax.nn.relu(y + residual))


@pytest.mark.long
def test_relu_of_sharded_or_mapped_batch_matches_whole_batch(normal, operands):
    x, gamma, beta, residual = operands((8, 3, 4, 5), -1, True)
    mesh = jax.make_mesh((4,), ("batch",), axis_types=(AxisType.Auto,))
    weights = normal(8, 3, 4, 5), normal(5)
    gradients = jax.jit(jax.grad(weighed(ours, weights), (0, 1, 2, 3)))
    where = NamedSharding(mesh, P("batch"))
    cut = [jax.device_put(each, where) for each in (x, residual)]
    exact = gradients(x, gamma, beta, residual)
    agree(gradients(cut[0], gamma, beta, cut[1]), exact)
    parts = P("batch"), P(), P(), P("batch")
    mapped = jax.shard_map(
        partial(ours, axis_name="batch"), mesh=mesh, in_specs=parts, out_specs=(parts[0], P(), P())
    )
    agree(mapped(x, gamma, beta, residual), composed(x, gamma, beta, residual))


OTHERS = {
    "relu6": jax.nn.relu6,
    Activation("relu", 0.75): lambda y: jnp.clip(y, 0.0, 0.75),
    "silu": jax.nn.silu,
    "hardswish": jax.nn.hard_swish,
}


@pytest.mark.covering(0)
@pytest.mark.parametrize("activation", OTHERS, ids=str)
def test_activation_matches_composed_values_and_gradients(activation, normal, operands):
    arguments = operands((6, 3, 4, 5), -1, False)

    @jax.jit
    def theirs(*arguments):
        y, *statistics = textbook(*arguments)
        return OTHERS[activation](y), *statistics

    functions = partial(ours, activation=activation), theirs
    weights = normal(6, 3, 4, 5), normal(5)
    agree(*(function(*arguments) for function in functions))
    agree(*(jax.grad(weighed(function, weights), (0, 1, 2))(*arguments) for function in functions))
    layer = backnorm.jax.nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    for frozen in (False, True):
        y = layer(arguments[0], frozen)
        agree(layer(arguments[0], frozen, activation=activation), OTHERS[activation](y), 1e-6)


@pytest.mark.covering(0)
@pytest.mark.parametrize("activation", ["relu", "relu6", Activation("relu", 0.75)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_relu_has_no_slope_at_its_bounds(activation, masked, normal):
    x, dy, zeros = normal(6, 3, 4, 5), normal(6, 3, 4, 5), jnp.zeros(5)
    options = {"mask": jnp.ones(x.shape, bool)} if masked else {}
    ceiling = {"relu": 0.0, "relu6": 6.0}.get(activation, 0.75)
    for bound in (0.0, ceiling):
        slope = jax.grad(
            lambda beta: jnp.vdot(dy, ours(x, zeros, beta, activation=activation, **options)[0])
        )
        np.testing.assert_array_equal(slope(zeros + bound), zeros)


def test_ceiling_with_residual_bounds_the_sum(operands):
    x, gamma, beta, residual = operands((6, 3, 4, 5), -1, True)
    y, *_ = textbook(x, gamma, beta)
    found = ours(x, gamma, beta, residual, activation=Activation("relu", 0.75))[0]
    agree(found, jnp.clip(y + residual, 0.0, 0.75))


@pytest.mark.covering(1)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("axis", [-1, (1, -1)])
def test_layers_with_relu_and_residual_match_separate_relu(frozen, axis, normal):
    x, residual = normal(4, 3, 5, 2), normal(4, 3, 5, 2)
    count = 6 if isinstance(axis, tuple) else 2
    layer = backnorm.jax.nnx.BatchNorm(count, axis=axis, rngs=nnx.Rngs(0))
    if not isinstance(axis, tuple) or not frozen:
        y = layer(x, frozen)
        assert type(layer) is not flax.nnx.BatchNorm
        agree(layer(x, frozen, activation="relu"), jax.nn.relu(y))
        agree(
            layer(x, frozen, activation="relu", residual=residual), jax.nn.relu(y + residual), 1e-6
        )
    settings = {"use_running_average": frozen, "axis": axis, "param_dtype": jnp.float64}
    ours, theirs = (kind(**settings) for kind in (backnorm.jax.linen.BatchNorm, linen.BatchNorm))
    variables = theirs.init(jax.random.key(0), x)
    y, _ = theirs.apply(variables, x, mutable="batch_stats")
    z, _ = ours.apply(variables, x, activation="relu", residual=residual, mutable="batch_stats")
    agree(z, jax.nn.relu(y + residual), 1e-6)


def test_batch_norm_rejects_bad_activations_and_residuals(operands):
    x, gamma, beta, residual = operands((6, 3, 4, 5), -1, True)
    arguments = {"epsilon": EPSILON, "residual": residual}
    with pytest.raises(ArgumentValueError, match="a residual with activation='relu'"):
        bn.batch_norm(x, gamma, beta, **arguments)
    with pytest.raises(ArgumentValueError, match="a residual with activation='relu'"):
        ours(x, gamma, beta, residual, activation="silu")
    for activation in ("gelu", True, jax.nn.silu, Activation("silu", 6.0)):
        with pytest.raises(ArgumentValueError, match="activation"):
            ours(x, gamma, beta, activation=activation)
    layer = backnorm.jax.nnx.BatchNorm(5, rngs=nnx.Rngs(0))
    for frozen in (False, True):
        with pytest.raises(ArgumentValueError, match="a residual with activation='relu'"):
            layer(x, frozen, residual=residual)
        with pytest.raises(ArgumentValueError, match="residual"):
            layer(x, frozen, activation="relu", residual=residual[:3])
