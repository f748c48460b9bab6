"""The arithmetic of kernels, formulas and derivatives, and which setting decides it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import export

import backnorm
import backnorm.jax
from backnorm import ArgumentValueError
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from backnorm.jax import formulas
from backnorm.jax.ffi import TARGET
from backnorm.jax.linen import BatchNorm as LinenBatchNorm
from backnorm.jax.nnx import BatchNorm as NnxBatchNorm
from backnorm.options import Options
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32

BOTH = ("float32", "float64")
# So many elements that some of float16, too, depend on the arithmetic.
SHAPE = (12, 5, 40, 41)
OTHER = {"float32": "float64", "float64": "float32"}
TYPES = pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16], ids=str)
ARITHMETICS = pytest.mark.parametrize("arithmetic", BOTH)
NEEDS = r"^arithmetic: must be float32 where jax\.numpy computes.* jax_enable_x64.*got 'float64'"


@pytest.fixture
def data(rng):
    """Return a function that makes realistic data of a type, far from a mean of 0."""
    return lambda dtype, **settings: realistic_data(SHAPE, dtype, rng=rng, ratio=30.0, **settings)


def same(found, expected):
    assert len(found) == len(expected) > 0
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(other), strict=True)


def differ(found, others):
    assert any(
        (np.asarray(own) != np.asarray(other)).any()
        for own, other in zip(found, others, strict=True)
    )


def canonical(data, arithmetic):
    """Return y, mean and variance from NumPy's function."""
    settings = {"epsilon": data.epsilon, "arithmetic": arithmetic}
    return backnorm.batch_norm_forward(data.x, data.gamma, data.beta, **settings)


@ARITHMETICS
def test_second_order_does_not_depend_on_arithmetic(arithmetic, data):
    operands = data(FLOAT32)
    inputs = tuple(map(jnp.asarray, operands.backward_inputs))
    found = []
    for each in (arithmetic, None):
        settings = {"epsilon": operands.epsilon, "axis": 1, "arithmetic": each}
        results, pull = jax.vjp(partial(backnorm.jax.batch_norm_backward, **settings), *inputs)
        # The same cotangents: the results themselves are not the same.
        found.append(pull(tuple(jnp.sin(1 + jnp.arange(r.size).reshape(r.shape, order="C")
            ).astype(r.dtype) for r in results)))  # fmt: skip
    same(*found)


@ARITHMETICS
def test_compiled_function_keeps_the_arithmetic_of_its_trace(arithmetic, data):
    operands = data(FLOAT32)
    settings = {"epsilon": operands.epsilon, "axis": 1}

    @jax.jit
    def compiled(x, gamma, beta):
        return backnorm.jax.batch_norm(x, gamma, beta, **settings)

    inputs = operands.x, operands.gamma, operands.beta
    expected = canonical(operands, arithmetic)
    with backnorm.arithmetic(arithmetic):
        same(compiled(*inputs), expected)
        allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
        serialized = export.export(compiled, disabled_checks=allowed)(*inputs).serialize()
    with backnorm.arithmetic(OTHER[arithmetic]):
        same(compiled(*inputs), expected)
        same(export.deserialize(serialized).call(*inputs), expected)


@pytest.mark.covering(0)
@ARITHMETICS
@TYPES
def test_batch_norm_over_named_axis_normalises_by_shared_statistics(dtype, arithmetic, data):
    operands = data(dtype)
    settings = {
        "epsilon": operands.epsilon,
        "axis": 1,
        "arithmetic": arithmetic,
        "axis_name": "parts",
    }
    parts = operands.x.reshape(2, -1, *SHAPE[1:])
    mapped = jax.vmap(
        lambda x: backnorm.jax.batch_norm(x, operands.gamma, operands.beta, **settings),
        axis_name="parts",
    )
    y, mean, variance = (np.asarray(each) for each in mapped(parts))
    same(mean[:1], mean[1:])
    wide = operands.x.astype(np.float64)
    if arithmetic == "float64":
        # Rounded once.
        exact = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
        same([mean[0], variance[0]], [each.astype(mean.dtype) for each in exact])
    statistics = mean[0], variance[0], operands.gamma, operands.beta
    expected = backnorm.batch_norm_inference(
        operands.x, *statistics, epsilon=operands.epsilon, arithmetic=arithmetic
    )
    same([y.reshape(SHAPE)], [expected])


@TYPES
def test_masked_statistics_in_float64_are_rounded_once(dtype, data, rng):
    operands, mask = data(dtype), rng.random(SHAPE) < 0.5
    settings = {"epsilon": operands.epsilon, "axis": 1, "arithmetic": "float64"}
    _, mean, variance = backnorm.jax.batch_norm(operands.x, mask=mask, **settings)
    kept = [operands.x[:, c][mask[:, c]].astype(np.float64) for c in range(SHAPE[1])]
    same([mean], [np.array([each.mean() for each in kept], FLOAT32)])
    same([variance], [np.array([each.var() for each in kept], FLOAT32)])


def test_flax_layers_store_arithmetic_and_show_it_in_repr():
    layer = LinenBatchNorm(arithmetic="float32")
    assert "arithmetic = 'float32'" in repr(layer)
    assert layer.clone().arithmetic == "float32"
    # As a field of flax's layer, it is not positional for anything that was.
    theirs = list(linen.BatchNorm.__dataclass_fields__)
    fields = LinenBatchNorm.__dataclass_fields__
    own = [name for name in fields if name not in ("arithmetic", "reproducible")]
    assert own == theirs
    assert LinenBatchNorm().arithmetic is NnxBatchNorm(3, rngs=nnx.Rngs(0)).arithmetic is None
    layer = NnxBatchNorm(3, rngs=nnx.Rngs(0), arithmetic="float32")
    assert "arithmetic='float32'" in repr(layer)
    assert nnx.clone(layer).arithmetic == "float32"


def test_batch_norm_of_float64_array_without_x64_computes_as_float32(data):
    operands = data(np.dtype(np.float64))
    with jax.enable_x64(False):
        y, *_ = backnorm.jax.batch_norm(operands.x, epsilon=1e-3, axis=1, arithmetic="float32")
        assert y.dtype == FLOAT32
    x = operands.x.astype(FLOAT32)
    same([y], [backnorm.batch_norm_forward(x, epsilon=1e-3, arithmetic="float32").y])


class TestFormulas:
    """The function that runs where there are no kernels."""

    @pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
    def test_rounded_rounds_float64_once(self, dtype, near_middles):
        near, nearest = near_middles(dtype)
        others = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e300, 1e-300]
        rounded = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, np.inf, 0.0], dtype)
        wide = np.concatenate([near, -near, others])
        expected = np.concatenate([nearest, -nearest, rounded])
        with jax.enable_x64(True):
            found = jax.jit(partial(formulas._rounded, dtype=dtype))(wide)
            weights = np.arange(9).astype(dtype)
            slopes = jax.grad(lambda a: (formulas._rounded(a, dtype) * weights).sum())(wide[:9])
        assert found.dtype == dtype
        same([np.asarray(found).astype("d")], [expected.astype("d")])
        np.testing.assert_array_equal(slopes, weights.astype("d"))

    @pytest.mark.covering(0)
    @TYPES
    def test_formulas_in_float64_pass_judge(self, dtype, data):
        operands = data(dtype)
        options = Options(operands.epsilon, (1,), arithmetic="float64")
        x, gamma, beta = operands.x, operands.gamma, operands.beta
        judged = {"epsilon": operands.epsilon, "arithmetic": "float64"}

        def passed(verdicts):
            assert [each.detail for each in verdicts.values() if not each.passed] == []

        found = jax.jit(partial(formulas.forward, options=options))(x, gamma, beta)
        passed(check_forward(x, gamma, beta, tuple(map(np.asarray, found)), **judged))
        channels = operands.mean, operands.variance, gamma, beta
        (y,) = jax.jit(partial(formulas.normalize, options=options))(x, *channels)
        passed(check_inference(x, *channels, np.asarray(y), **judged))
        for training in (True, False):
            chosen = options._replace(training=training)
            function = partial(formulas.backward, options=chosen)
            found = tuple(map(np.asarray, jax.jit(function)(*operands.backward_inputs)))
            passed(check_backward(*operands.backward_inputs, found, training=training, **judged))

    @pytest.mark.long
    @TYPES
    def test_formulas_without_arithmetic_use_float32(self, dtype, data):
        operands = data(dtype)
        inputs = operands.x, operands.gamma, operands.beta
        options = [Options(operands.epsilon, (1,), arithmetic=each) for each in (None, *BOTH)]
        found = [formulas.forward(*inputs, each) for each in options]
        same(found[0], found[1])
        differ(found[0], found[2])

    @pytest.mark.long
    def test_formulas_in_float64_without_x64_raise_argument_value_error(self, data):
        operands = data(FLOAT32)
        settings, options = (
            {"epsilon": operands.epsilon, "axis": 1},
            Options(operands.epsilon, (1,)),
        )
        x = operands.x

        def of_parts(**more):
            called = partial(backnorm.jax.batch_norm, axis_name="parts", **settings, **more)
            return jax.vmap(called, axis_name="parts")(x[None])

        with jax.enable_x64(False):
            for call in (
                lambda **more: formulas.forward(
                    x, operands.gamma, operands.beta, options._replace(**more)
                ),
                lambda **more: formulas.backward(
                    *operands.backward_inputs, options._replace(**more)
                ),
                partial(backnorm.jax.batch_norm, x, mask=x > 0, **settings),
                of_parts,
            ):
                with pytest.raises(ArgumentValueError, match=NEEDS):
                    call(arithmetic="float64")
                call(arithmetic="float32")
                call()
            # Of no elements nothing is computed; and kernels need no 64 bits of JAX.
            backnorm.jax.batch_norm(x[:0], arithmetic="float64", **settings)
            found = backnorm.jax.batch_norm(
                x, operands.gamma, operands.beta, arithmetic="float64", **settings
            )
        same(found, canonical(operands, "float64"))
