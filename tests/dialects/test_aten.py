"""ATen: native_batch_norm_backward and its two halves; PyTorch itself is not imported."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.dialects import aten, registry

EPS = 1e-3
TYPES = [("f64", "f64"), ("f32", "f32"), ("f16", "f16"), ("f16", "f32"), ("bf16", "f32")]
TYPES += [("bf16", "bf16")]
ALL = [True, True, True]
NAMES = ("grad_out", "input", "weight", "running_mean", "running_var", "save_mean", "save_invstd")


def inverse_of(b):
    return (1 / np.sqrt(b["variance"].astype(float) + EPS)).astype(b["variance"].dtype)


def arguments(b, *, train=True, **changes):
    """Return the arguments by name; those that are not used are None."""
    operands = {"grad_out": b["dy"], "input": b["x"], "weight": b["gamma"]}
    if train:
        operands |= {"save_mean": b["mean"], "save_invstd": inverse_of(b)}
    else:
        operands |= {"running_mean": b["mean"], "running_var": b["variance"]}
    options = {"train": train, "eps": EPS, "output_mask": ALL}
    return dict.fromkeys(NAMES) | operands | options | changes


def call(b, **options):
    return aten.native_batch_norm_backward(*arguments(b, **options).values())


@pytest.fixture
def b(batch):
    return batch((4, 3, 5), "NCX")


@pytest.mark.parametrize("mask", [[a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)])
@pytest.mark.parametrize("train", [True, False])
def test_output_mask_selects_returned_gradients(b, mask, train):
    mask = [bool(flag) for flag in mask]
    everything = call(b, train=train)
    for flags in (mask, tuple(mask), np.array(mask)):
        some = call(b, train=train, output_mask=flags)
        assert [value is not None for value in some] == mask
        for value, known in zip(some, everything, strict=True):
            if value is not None:
                np.testing.assert_array_equal(value, known)


@pytest.mark.parametrize("train", [True, False])
def test_backward_ignores_unused_statistics(b, same, train):
    expected = call(b, train=train)
    unused = ("running_mean", "running_var") if train else ("save_mean", "save_invstd")
    for junk in (np.empty(0, "f"), np.full(3, np.nan, "f"), np.ones((7, 7))):
        same(call(b, train=train, **dict.fromkeys(unused, junk)), expected)


# The forward passes


def test_forward_without_running_statistics_has_no_updated_ones(b):
    inputs = {"input": b["x"], "weight": b["gamma"]}
    attributes = {"training": True, "momentum": 0.1, "eps": EPS}
    invoke = registry.operator("aten", "native_batch_norm").invoke
    found = invoke(inputs, attributes)
    assert list(found) == ["out", "save_mean", "save_invstd"]
    returned = aten.native_batch_norm(b["x"], b["gamma"], None, None, None, True, 0.1, EPS)
    assert returned[3:] == (None, None)
    for array, known in zip(found.values(), returned, strict=False):
        np.testing.assert_array_equal(array, known)
    with pytest.raises(ValueError, match=r"outputs: .* has no output 'running_mean_out'"):
        invoke(inputs, attributes, ["out", "save_mean", "save_invstd", "running_mean_out"])


# The two phases


def parts(b, **changes):
    operands = {
        "grad_out": b["dy"],
        "input": b["x"],
        "mean": b["mean"],
        "invstd": inverse_of(b),
        "weight": b["gamma"],
    }
    return operands | changes


def wanted(**changes):
    return {"input_g": True, "weight_g": True, "bias_g": True} | changes


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_reduce_and_elemt_match_native_batch_norm_backward(batch, types, weighted):
    b = batch((6, 3, 8), "NCX", *types)
    b["gamma"] = b["gamma"] if weighted else None
    whole = call(b)
    sums = aten.batch_norm_backward_reduce(**parts(b), **wanted())
    assert [s.dtype for s in sums] == [b["mean"].dtype] * 4
    count = np.array([b["x"].size // 3])
    part = aten.batch_norm_backward_elemt(**parts(b), sum_dy=sums[0], sum_dy_xmu=sums[1],
                                          count=count)  # fmt: skip
    # The sums are rounded between the phases: to 8 bits, if the statistics have no more.
    digits = {"f64": 1e-13, "f32": 2e-6, "f16": 4e-3, "bf16": 3e-2}
    loss = digits[types[1]] + (digits[types[0]] if types[1] != types[0] else 0)
    near = {"rtol": loss, "atol": loss}
    np.testing.assert_allclose(part.astype(float), whole[0].astype(float), **near)
    assert part.dtype == b["x"].dtype
    np.testing.assert_allclose(sums[2].astype(float), whole[1].astype(float), **near)
    np.testing.assert_array_equal(sums[3], whole[2])


def test_elemt_with_added_float64_sums_has_the_bits_of_native_backward(batch):
    """Sums of parts, added in float64, give the bits of the whole gradient."""
    b = batch((6, 3, 8), "NCX")
    wide = {name: array.astype(np.float64) for name, array in b.items()}
    total_dy, total_xmu = np.zeros((2, 3))
    for rows in (slice(0, 1), slice(1, 1), slice(1, 6)):
        piece = wide | {"x": wide["x"][rows], "dy": wide["dy"][rows]}
        sum_dy, sum_dy_xmu, *_ = aten.batch_norm_backward_reduce(**parts(piece), **wanted())
        total_dy, total_xmu = total_dy + sum_dy, total_xmu + sum_dy_xmu
    count = np.array([[8], [0], [40]], np.int32)
    part = aten.batch_norm_backward_elemt(
        **parts(b), sum_dy=total_dy, sum_dy_xmu=total_xmu, count=count
    )
    np.testing.assert_array_equal(part, call(b)[0])


def test_reduce_and_elemt_of_bfloat16_weight_accept_float32_statistics(batch, dtypes):
    b = batch((6, 3, 8), "NCX", "bf16", "f32")
    b["gamma"] = b["gamma"].astype(dtypes["bf16"])
    sums = aten.batch_norm_backward_reduce(**parts(b), **wanted())
    assert [str(s.dtype) for s in sums] == ["float32", "float32", "bfloat16", "bfloat16"]
    count = np.array([48])
    part = aten.batch_norm_backward_elemt(
        **parts(b), sum_dy=sums[0], sum_dy_xmu=sums[1], count=count
    )
    b["gamma"] = b["gamma"].astype(np.float32)
    np.testing.assert_allclose(part.astype(float), call(b)[0].astype(float), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["input_g", "weight_g", "bias_g"])
def test_reduce_returns_none_for_unrequested_sums(b, name):
    places = {"input_g": (0, 1), "weight_g": (2,), "bias_g": (3,)}[name]
    results = aten.batch_norm_backward_reduce(**parts(b), **wanted(**{name: False}))
    assert [value is None for value in results] == [k in places for k in range(4)]


def test_reduce_results_share_no_memory(b):
    results = aten.batch_norm_backward_reduce(**parts(b), **wanted())
    for k, array in enumerate(results):
        assert not any(np.may_share_memory(array, other) for other in results[:k])


def elemt(b, **changes):
    zeros = np.zeros(3, b["mean"].dtype)
    operands = {"sum_dy": zeros, "sum_dy_xmu": zeros, "count": np.array([20])}
    return aten.batch_norm_backward_elemt(**parts(b) | operands | changes)


def test_reduce_and_elemt_of_empty_part_return_zeros_and_empty_array(b):
    empty = b | {"x": b["x"][:0], "dy": b["dy"][:0]}
    results = aten.batch_norm_backward_reduce(**parts(empty), **wanted())
    for values in results:
        np.testing.assert_array_equal(values, np.zeros(3, "f"))
    assert elemt(empty, count=np.array([0])).shape == (0, 3, 5)
    assert elemt(empty).shape == (0, 3, 5)
