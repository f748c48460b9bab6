"""Paddle: the flags that interact, and what its CPU kernel returned."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from backnorm import reference
from backnorm.conformance.judge import judge
from backnorm.dialects.paddle import batch_norm_grad

EPSILON = 1e-3
F32_EPSILON = float(np.float32(EPSILON))
VALUES = Path(__file__).with_name("paddle_values.npz")
FLAGS = "is_test", "use_global_stats", "trainable_statistics"
# As paddle_probe.py writes them.
DATA = "x", "out_grad", "x_grad"
CHANNELS = (
    "scale", "bias", "mean_out", "variance_out", "saved_mean", "saved_variance", "scale_grad",
    "bias_grad",
)  # fmt: skip
RESULTS = {"x_grad": "dx", "scale_grad": "dgamma", "bias_grad": "dbeta"}
TYPES = {"f32": "f32", "f64": "f64", "f16": "f32", "bf16": "f32"}
LAYOUTS = {"NCHW": "NCX", "NHWC": "NXC"}


def inputs_of(b, frozen=False):
    """Return inputs, with NaN for the statistics that a call does not use."""
    unused = np.full_like(b["mean"], np.nan)
    inverse = (1 / np.sqrt(b["variance"].astype(float) + EPSILON)).astype(b["mean"].dtype)
    return {
        "x": b["x"],
        "scale": b["gamma"],
        "bias": b["beta"],
        "mean_out": b["mean"] if frozen else unused,
        "variance_out": b["variance"] if frozen else unused,
        "saved_mean": unused if frozen else b["mean"],
        "saved_variance": unused if frozen else inverse,
        "out_grad": b["dy"],
    }


def call(operands, **changes):
    usual = {"momentum": 0.9, "epsilon": EPSILON, "data_format": "NCHW"}
    return batch_norm_grad(**operands | usual | dict.fromkeys(FLAGS, False) | changes)


@pytest.fixture
def b(batch):
    return batch((4, 3, 5), "NCX")


def recorded():
    """Return Paddle's inputs and outputs by the name of the case."""
    cases = defaultdict(dict)
    with np.load(VALUES) as found:
        assert str(found["version"]) == "3.3.1"
        for key in found.files:
            case, _, kind = key.rpartition(",")
            rows = zip({"data": DATA}.get(kind, CHANNELS), found[key], strict=True) if case else ()
            cases[case] |= {name: row for name, row in rows if not np.isnan(row).any()}
    del cases[""]
    return cases


RECORDED = recorded()


@pytest.mark.parametrize("case", RECORDED)
def test_batch_norm_grad_of_recorded_inputs_matches_paddle(case):
    _, dtype, layout, flags, absent = case.split(",")
    arrays = RECORDED[case]
    inputs = {name: array for name, array in arrays.items() if name not in RESULTS}
    true = dict.fromkeys(filter(None, flags.split("+")), True)
    ours = dict(zip(RESULTS, call(inputs, data_format=layout, **true), strict=True))
    theirs = {name: arrays[name] for name in RESULTS if name in arrays}
    assert list(theirs) == (["x_grad"] if absent in ("scale", "bias") else list(RESULTS))
    # Its kernel adds up in the type of the elements.
    loss = {"float32": 1e-5, "float64": 1e-14}[dtype]
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        scale = np.abs(array).max(initial=1)
        np.testing.assert_allclose(ours[name], array, rtol=0, atol=loss * scale, strict=True)


def test_recorded_cases_have_expected_number():
    assert len(RECORDED) == 4 * (2 ** len(FLAGS) + 5 + 3)


@pytest.mark.parametrize("is_test", [False, True])
@pytest.mark.parametrize("use_global_stats", [False, True])
@pytest.mark.parametrize("trainable_statistics", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("types", [("f32", "f32"), ("bf16", "f32")])
def test_batch_norm_grad_with_flags_is_within_error_budget(
    batch, layout, types, is_test, use_global_stats, trainable_statistics
):
    shape = (2, 4, 3, 5) if layout == "NCHW" else (2, 3, 5, 4)
    b = batch(shape, LAYOUTS[layout], *types)
    frozen = is_test or use_global_stats
    operands = inputs_of(b, frozen)
    flags = dict(zip(FLAGS, (is_test, use_global_stats, trainable_statistics), strict=True))
    out = call(operands, data_format=layout, **flags)
    assert [o.dtype for o in out] == [b["x"].dtype, b["mean"].dtype, b["mean"].dtype]
    if frozen:
        variance, epsilon = b["variance"], F32_EPSILON
    else:
        variance, epsilon = 1 / operands["saved_variance"].astype(float) ** 2, 0.0
    mean, gamma = (b[name].astype(float) for name in ("mean", "gamma"))
    exact = reference.backward(
        b["x"], b["dy"], mean, variance.astype(float), gamma, epsilon=epsilon,
        data_format=LAYOUTS[layout], training=not frozen,
    )  # fmt: skip
    for name, array in zip(RESULTS.values(), out, strict=True):
        terms = getattr(exact, f"{name}_terms")
        verdict = judge(name, array, getattr(exact, name), terms, b["x"].dtype)
        assert verdict.passed, verdict.detail


@pytest.mark.parametrize("empty", [None, np.zeros(0, "f")])
def test_batch_norm_grad_accepts_empty_unused_statistics(b, same, empty):
    training, frozen = inputs_of(b), inputs_of(b, True)
    for name in ("mean_out", "variance_out", "reserve_space"):
        same(call(training | {name: empty}), call(training))
    same(call(frozen | {"reserve_space": empty}, is_test=True), call(frozen, is_test=True))
    for name in ("saved_mean", "saved_variance"):
        if empty is None:
            with pytest.raises(TypeError, match=f"^{name}: is a required input"):
                call(frozen | {name: None}, is_test=True)
        else:
            same(call(frozen | {name: empty}, is_test=True), call(frozen, is_test=True))


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
@pytest.mark.parametrize("dtype", TYPES)
def test_batch_norm_grad_of_one_element_copies_out_grad_in_training_only(batch, shape, dtype):
    b = batch(shape, "NCX", dtype, TYPES[dtype])
    operands = inputs_of(b)
    operands["scale"] = operands["scale"] + np.float32(2)
    for _ in range(2):
        dx, dgamma, dbeta = call(operands)
        np.testing.assert_array_equal(dx, b["dy"], strict=True)
        assert not np.may_share_memory(dx, b["dy"])
        for array in (dgamma, dbeta):
            np.testing.assert_array_equal(array, np.zeros_like(b["mean"]), strict=True)
    frozen = call(inputs_of(b, True), use_global_stats=True)
    np.testing.assert_array_equal(frozen[2], b["dy"].reshape(-1))
    assert (frozen[0] != b["dy"]).any()
