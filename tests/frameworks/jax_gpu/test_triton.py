"""The kernels for GPUs as JAX calls them, in Triton's interpreter and on the CPU's memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backnorm
import backnorm.jax
from backnorm.conformance.data import realistic_data
from backnorm.conformance.judge import check_backward, check_forward, check_inference
from backnorm.executable import forget
from backnorm.gpu.device import KNOWN
from backnorm.jax import cuda
from tests.support import internals
from tests.support.dtypes import ELEMENT_TYPES

from .. import interpreter
from ..jax.conftest import EPSILON, SHAPES, agree, textbook, weighed
from . import interpreted

# One launch does all; and never, since a row holds a few channels many times over.
ONE, SEVERAL = (6, 5, 3, 4), (300, 3)
WAYS, STEPS = ("forward", "backward"), ("sums", "finish", "apply")


@pytest.fixture(scope="module", autouse=True)
def interpreted_kernels():
    interpreted.take_the_place_of_the_cpu()
    with interpreter.rounding_as_hardware_does():
        yield


@pytest.fixture(autouse=True)
def library(monkeypatch):
    found = interpreted.Library()
    internals.jax_triton_is(monkeypatch, lambda: found)
    jax.clear_caches()
    yield found
    jax.clear_caches()


# How the kernels compute is checked beside them, in `gpu/`; here, that they are called right.
@pytest.fixture(params=["h200", pytest.param("l40s", marks=pytest.mark.sweep)])
def gpu(request, monkeypatch):
    """A device that is fast at float64, and one that is not."""
    monkeypatch.setattr(cuda, "device", lambda: KNOWN[request.param])
    return KNOWN[request.param]


def axis_of(data_format):
    return 1 if data_format == "NCX" else -1


def arrays(values):
    return tuple(np.asarray(value) for value in values)


def assert_passed(verdicts):
    assert [verdict.detail for verdict in verdicts.values() if not verdict.passed] == []


def backward(*inputs, epsilon, data_format, training):
    gradients = backnorm.jax.batch_norm_backward(
        *inputs, epsilon=epsilon, axis=axis_of(data_format), training=training
    )
    return arrays(gradients)


RARE = pytest.mark.sweep


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[RARE] if dtype in ("float64", "float16") else [])
        for dtype in ELEMENT_TYPES
    ],
    ids=str,
)
@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize(
    "shape", [ONE, SEVERAL, *(pytest.param(s, marks=RARE) for s in ((3, 1, 7), (70, 3, 5)))]
)
def test_forward_inference_and_backward_are_within_budget(
    shape, data_format, dtype, gpu, library, rng
):
    data = realistic_data(shape, dtype, data_format=data_format, rng=rng, ratio=10.0)
    options = {"epsilon": data.epsilon, "axis": axis_of(data_format)}
    found = backnorm.jax.batch_norm(data.x, data.gamma, data.beta, **options)
    assert [each.dtype for each in found] == [dtype, data.gamma.dtype, data.gamma.dtype]
    assert_passed(check_forward(data.x, data.gamma, data.beta, arrays(found), **data.options))
    operands = (data.x, data.mean, data.variance, data.gamma, data.beta)
    y = np.asarray(backnorm.jax.batch_norm_inference(*operands, **options))
    assert_passed(check_inference(*operands, y, **data.options))
    operands = (data.x, data.dy, data.mean, data.variance, data.gamma)
    for training in (True, False):
        found = backward(*operands, **data.options, training=training)
        assert_passed(check_backward(*operands, found, **data.options, training=training))
    assert library.calls


class TestCalls:
    """Which kernels are called, for plans of one launch and of several."""

    @pytest.mark.parametrize(
        ("shape", "ran"),
        [
            (ONE, ["forward_complete", "backward_complete"]),
            (SEVERAL, [f"{way}_{step}" for way in WAYS for step in STEPS]),
        ],
    )
    def test_vjp_calls_expected_kernels(self, shape, ran, gpu, library, layer, normal):
        x, gamma, beta = layer(shape, 1)

        def normalised(*inputs):
            return backnorm.jax.batch_norm(*inputs, epsilon=EPSILON, axis=1)[0]

        _, pull_back = jax.vjp(normalised, x, gamma, beta)
        pull_back(normal(*shape))
        assert library.calls == ran

    @pytest.mark.parametrize("shape", [ONE, SEVERAL])
    def test_inference_calls_forward_apply_alone(self, shape, gpu, library, layer):
        x, gamma, beta = layer(shape, 1)
        backnorm.jax.batch_norm_inference(x, beta, gamma**2, gamma, beta, epsilon=EPSILON, axis=1)
        assert library.calls == ["forward_apply"]

    @pytest.mark.parametrize("shape", [(0, 5), (3, 0), (2, 5, 0)])
    def test_by_kernels_for_empty_shape_returns_false(self, shape, gpu):
        assert not cuda.by_kernels(shape, None)


@pytest.mark.long
@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_gradients_match_textbook(shape, axis, gpu, library, layer, normal):
    inputs = layer(shape, axis)
    weights = normal(*shape), normal(shape[axis])

    def ours(*inputs):
        return backnorm.jax.batch_norm(*inputs, epsilon=EPSILON, axis=axis)

    def theirs(*inputs):
        return textbook(*inputs, axis=axis)

    agree(*(jax.grad(weighed(each, weights), (0, 1, 2))(*inputs) for each in (ours, theirs)))
    assert library.calls


@pytest.mark.parametrize("shape", [ONE, SEVERAL])
def test_backward_matches_cpu_within_one_ulp(shape, gpu, library, rng):
    data = realistic_data(shape, np.dtype(np.float32), data_format="NCX", rng=rng, ratio=10.0)
    operands = (data.x, data.dy, data.mean, data.variance, data.gamma)
    found = backward(*operands, **data.options, training=True)
    expected = backnorm.batch_norm_backward(*operands, **data.options)
    assert library.calls
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_max_ulp(mine, other, 1)
        assert (mine != other).mean() < 0.01


def test_repeated_batch_norm_has_the_same_bits(gpu, library, layer):
    inputs = layer(SEVERAL, 1)
    inputs = [each.astype(jnp.float32) for each in inputs]
    first, second = (
        arrays(backnorm.jax.batch_norm(*inputs, epsilon=EPSILON, axis=1)) for _ in range(2)
    )
    assert [each.tobytes() for each in first] == [each.tobytes() for each in second]
    assert len(library.calls) == 6


@pytest.mark.long
class TestInstances:
    """`jax.vmap`: the channels of all instances, side by side."""

    def both(self, axes, inputs):
        """Return gradients of instances together, and of one after another."""

        def gradients(x, dy, gamma, beta):
            def normalised(*inputs):
                return backnorm.jax.batch_norm(*inputs, epsilon=EPSILON, axis=1)

            results, pull_back = jax.vjp(normalised, x, gamma, beta)
            return results, pull_back((dy, jnp.cos(beta), jnp.sin(gamma)))

        together = jax.vmap(gradients, axes)(*inputs)
        alone = []
        for k in range(3):
            pairs = zip(inputs, axes, strict=True)
            one = [each if axis is None else jnp.take(each, k, axis) for each, axis in pairs]
            alone.append(gradients(*one))
        return together, jax.tree.map(lambda *each: jnp.stack(each), *alone)

    @pytest.mark.parametrize("axes", [(0, 0, 0, 0), (2, 0, None, None), (None, 1, None, 0)])
    @pytest.mark.parametrize("shape", [(4, 5, 3), (1, 5, 6), (9, 2)])
    def test_vmap_matches_loop_over_instances(self, axes, shape, gpu, library, normal):
        sizes = (shape, shape, shape[1:2], shape[1:2])
        inputs = [
            normal(*(size if axis is None else (*size[:axis], 3, *size[axis:])))
            for size, axis in zip(sizes, axes, strict=True)
        ]
        agree(*self.both(axes, inputs))
        assert library.calls

    def test_nested_vmap_of_backward_matches_loop(self, gpu, library, normal):
        x, dy, mean = normal(2, 3, 4, 5), normal(2, 3, 4, 5), normal(3, 5)

        def backward(x, dy, mean):
            options = {"epsilon": EPSILON, "axis": 1}
            return backnorm.jax.batch_norm_backward(x, dy, mean, mean**2, **options)

        found = jax.vmap(jax.vmap(backward), (0, 0, None))(x, dy, mean)
        alone = [[backward(x[j, k], dy[j, k], mean[k]) for k in range(3)] for j in range(2)]
        rows = [jax.tree.map(lambda *each: jnp.stack(each), *row) for row in alone]
        agree(found, jax.tree.map(lambda *each: jnp.stack(each), *rows))
        # Six calls for those that stand alone.
        assert library.calls == [f"backward_{step}" for step in STEPS] * 7


@pytest.fixture
def computed(monkeypatch):
    """Return a list of what was planned, and the arithmetic."""
    seen = interpreter.arithmetics_planned(monkeypatch, cuda)
    forget()
    return seen


class TestArithmetic:
    """What a call, or its block, asks for is what its kernels compute in; see `gpu` for those."""

    @pytest.mark.parametrize(("dtype", "other"), [("float32", "float32"), ("bfloat16", "float64")])
    def test_requested_arithmetic_is_used_and_within_its_budget(
        self, dtype, other, gpu, computed, rng
    ):
        kind = np.dtype(jnp.dtype(dtype))
        data = realistic_data(SEVERAL, kind, data_format="NCX", rng=rng, ratio=10.0)
        options, judged = (
            {"epsilon": data.epsilon, "axis": 1},
            {**data.options, "arithmetic": other},
        )
        operands = (data.x, data.gamma, data.beta)
        found = backnorm.jax.batch_norm(*operands, **options, arithmetic=other)
        assert_passed(check_forward(*operands, arrays(found), **judged))
        operands = (data.x, data.dy, data.mean, data.variance, data.gamma)
        with backnorm.arithmetic(other):
            found = backnorm.jax.batch_norm_backward(*operands, **options)
        assert_passed(check_backward(*operands, arrays(found), **judged, training=True))
        operands = (data.x, data.mean, data.variance, data.gamma, data.beta)
        y = backnorm.jax.batch_norm_inference(*operands, **options, arithmetic=other)
        assert_passed(check_inference(*operands, np.asarray(y), **judged))
        wide = "float64" if gpu.fast_float64 else "pairs"
        expected = "float32" if other == "float32" else wide
        operations = ("forward", "backward", "inference")
        assert computed == [(operation, expected) for operation in operations]

    def test_backward_has_arithmetic_of_its_forward(self, gpu, computed, layer, normal):
        inputs = [each.astype(jnp.float32) for each in layer(ONE, 1)]

        def normalised(*inputs):
            return backnorm.jax.batch_norm(*inputs, epsilon=EPSILON, axis=1)[0]

        with backnorm.arithmetic("float32"):
            y, pull_back = jax.vjp(normalised, *inputs)
        pull_back(normal(*ONE).astype(y.dtype))
        assert computed == [("forward", "float32"), ("backward", "float32")]
