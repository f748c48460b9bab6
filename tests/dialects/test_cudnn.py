"""cuDNN: modes, blending, memory for the outputs, saved statistics or none."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm import BacknormError, reference
from backnorm.conformance.judge import judge
from backnorm.dialects.cudnn import BatchNormalizationBackward

EPSILON = 1e-3
ALLOWED = {("f64", "f64"), ("f32", "f32"), ("f16", "f32"), ("bf16", "f32")}
SHAPE = (4, 3, 5, 2)
BLENDS = ("alphaDataDiff", "betaDataDiff", "alphaParamDiff", "betaParamDiff")


def inputs_of(b, mode="SPATIAL"):
    """Return the arguments by name; statistics are those of x."""
    axes = (0, 2, 3) if mode == "SPATIAL" else (0,)
    channel = b["mean"].dtype
    wide = b["x"].astype(float)
    mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    scale = np.random.default_rng(5).normal(size=mean.shape)
    return {
        "mode": mode,
        **dict(zip(BLENDS, (1.0, 0.0, 1.0, 0.0), strict=True)),
        "x": b["x"],
        "dy": b["dy"],
        "dx": None,
        "bnScale": scale.astype(channel),
        "dBnScale": None,
        "dBnBias": None,
        "epsilon": EPSILON,
        "savedMean": mean.astype(channel),
        "savedInvVariance": (1 / np.sqrt(variance + EPSILON)).astype(channel),
    }


def call(operands, **changes):
    return BatchNormalizationBackward(*(operands | changes).values())


def rejects(error_type, match, operands, **changes):
    with pytest.raises(error_type, match=match) as error:
        call(operands, **changes)
    assert isinstance(error.value, BacknormError)


@pytest.fixture
def operands(batch):
    return inputs_of(batch(SHAPE, "NCX"))


def judged(out, operands, mode):
    """Compare with the oracle, with (N, C) or (N, C * space) where the mode is per activation."""
    x, dy = operands["x"], operands["dy"]
    if mode == "PER_ACTIVATION":
        x, dy = x.reshape(len(x), -1), dy.reshape(len(x), -1)
    mean, inverse, scale = (
        operands[name].reshape(-1) for name in ("savedMean", "savedInvVariance", "bnScale")
    )
    exact = reference.backward(x, dy, mean, 1 / inverse.astype(float) ** 2, scale, epsilon=0.0)
    for name, actual in zip(("dx", "dgamma", "dbeta"), out, strict=True):
        known, terms = getattr(exact, name), getattr(exact, f"{name}_terms")
        verdict = judge(name, actual.reshape(known.hi.shape), known, terms, x.dtype)
        assert verdict.passed, verdict.detail


@pytest.mark.parametrize("mode", ["SPATIAL", "PER_ACTIVATION"])
@pytest.mark.parametrize("types", sorted(ALLOWED))
def test_backward_is_within_budget(batch, types, mode):
    operands = inputs_of(batch(SHAPE, "NCX", *types), mode)
    out = call(operands)
    kept = (1, 3, 1, 1) if mode == "SPATIAL" else (1, 3, 5, 2)
    assert [o.shape for o in out] == [SHAPE, kept, kept]
    assert [o.dtype for o in out] == [operands["x"].dtype] + [operands["bnScale"].dtype] * 2
    judged(out, operands, mode)


@pytest.mark.parametrize("mode", ["SPATIAL", "PER_ACTIVATION"])
@pytest.mark.parametrize("types", sorted(ALLOWED))
def test_backward_without_saved_statistics_computes_them_from_x(batch, types, mode):
    operands = inputs_of(batch(SHAPE, "NCX", *types), mode)
    out = call(operands, savedMean=None, savedInvVariance=None)
    x, dy = operands["x"], operands["dy"]
    if mode == "PER_ACTIVATION":
        x, dy = x.reshape(len(x), -1), dy.reshape(len(x), -1)
    wide = x.astype(float)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    exact = reference.backward(
        x, dy, wide.mean(axes), wide.var(axes), operands["bnScale"].reshape(-1), epsilon=EPSILON
    )
    digits = {"f64": 1e-12, "f32": 1e-5, "f16": 2e-2, "bf16": 1e-1}[types[0]]
    for actual, name in zip(out, ("dx", "dgamma", "dbeta"), strict=True):
        known = getattr(exact, name).hi
        np.testing.assert_allclose(
            actual.reshape(known.shape).astype(float), known, rtol=digits, atol=digits
        )
    # Epsilon counts here, and not beside saved statistics.
    changed = call(operands, savedMean=None, savedInvVariance=None, epsilon=0.5)
    assert (changed[1] != out[1]).any()
    for actual, known in zip(call(operands, epsilon=0.5), call(operands), strict=True):
        np.testing.assert_array_equal(actual, known)


def memory_like(operands, value=np.nan):
    return {
        "dx": np.full_like(operands["x"], value),
        "dBnScale": np.full_like(operands["bnScale"], value),
        "dBnBias": np.full_like(operands["bnScale"], value),
    }


def test_backward_with_output_memory_writes_to_it(operands):
    expected, memory = call(operands), memory_like(operands)
    # Output memory is not read where beta is 0: its NaN does not spread.
    out = call(operands, **memory)
    for actual, name, known in zip(out, memory, expected, strict=True):
        assert actual is memory[name]
        np.testing.assert_array_equal(actual, known)
    alone = call(operands, dBnBias=memory["dBnBias"])
    assert alone[2] is memory["dBnBias"]
    np.testing.assert_array_equal(alone[0], expected[0])


@pytest.mark.parametrize("mode", ["SPATIAL", "PER_ACTIVATION"])
@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("types", sorted(ALLOWED))
@pytest.mark.parametrize("shares", [(2.0, 0.0, 1.0, 0.0), (1.0, 1.0, 1.0, 1.0),
                                    (0.5, -0.25, 3.0, 0.125)])  # fmt: skip
def test_backward_blends_results_with_output_memory(batch, types, mode, shares, saved):
    operands = inputs_of(batch(SHAPE, "NCX", *types), mode)
    if not saved:
        operands |= {"savedMean": None, "savedInvVariance": None}
    wide = {name: array.astype(float) for name, array in
            zip(("dx", "dBnScale", "dBnBias"), call(operands), strict=True)}  # fmt: skip
    rng = np.random.default_rng(3)
    memory = {
        name: rng.normal(size=array.shape).astype(
            operands["x" if name == "dx" else "bnScale"].dtype
        )
        for name, array in wide.items()
    }
    wide_memory = {name: array.astype(float) for name, array in memory.items()}
    out = call(operands, **memory, **dict(zip(BLENDS, shares, strict=True)))
    weights = {"dx": shares[:2], "dBnScale": shares[2:], "dBnBias": shares[2:]}
    digits = {"f64": 1e-13, "f32": 1e-6, "f16": 2e-3, "bf16": 2e-2}
    for actual, name in zip(out, memory, strict=True):
        assert actual is memory[name]
        alpha, beta = weights[name]
        near = digits[types[0] if name == "dx" else types[1]]
        expected = alpha * wide[name] + beta * wide_memory[name]
        np.testing.assert_allclose(actual.astype(float), expected, rtol=near, atol=4 * near)


@pytest.mark.parametrize("shape", [(0, 3, 2), (2, 3, 0), (2, 0, 4)])
@pytest.mark.parametrize("shares", [(1.0, 0.0, 1.0, 0.0), (1.0, 0.0, 2.0, 1.0)])
def test_backward_of_empty_batch_scales_output_memory(shape, shares):
    x, kept = np.zeros(shape, "f"), (1, shape[1], 1)
    ones = np.ones(kept, "f")
    memory = np.full(kept, 3, "f"), np.full(kept, 5, "f")
    out = BatchNormalizationBackward("SPATIAL", *shares, x, x, None, ones, *memory, 0.1, ones, ones)
    assert out[0].shape == shape
    for actual, previous in zip(out[1:], (3, 5), strict=True):
        np.testing.assert_array_equal(actual, np.full(kept, shares[3] * previous, "f"))


@pytest.mark.parametrize("name", ["dx", "dBnScale", "dBnBias"])
@pytest.mark.parametrize("mode", ["SPATIAL", "PER_ACTIVATION"])
def test_output_memory_that_overlaps_itself_is_rejected(name, mode, batch):
    operands = inputs_of(batch(SHAPE, "NCX"), mode)
    like = operands["x"] if name == "dx" else operands["bnScale"]
    for strides in ([0] * like.ndim, [like.itemsize] * like.ndim):
        memory = np.lib.stride_tricks.as_strided(np.ones_like(like), like.shape, strides)
        # Along a single axis elements are beside each other.
        if not memory.flags.c_contiguous:
            rejects(
                ValueError, f"^{name}: has elements that share memory", operands, **{name: memory}
            )


@pytest.mark.parametrize("name", ["dx", "dBnScale", "dBnBias"])
def test_repeated_call_with_output_memory_that_overlaps_itself_is_rejected(name, operands):
    like = operands["x"] if name == "dx" else operands["bnScale"]
    good = np.empty((like.shape[0], 2 * like.shape[1], *like.shape[2:]), like.dtype)[:, ::2]
    call(operands, **{name: good})
    # Its flags are those of the good memory.
    memory = np.lib.stride_tricks.as_strided(np.ones_like(like), like.shape, [0] * like.ndim)
    assert memory.flags.num == good.flags.num
    message = f"^{name}: has elements that share memory"
    rejects(ValueError, message, operands, **{name: memory})
