"""Paddle: the flags that interact, and what its CPU kernel returned."""

from __future__ import annotations

import inspect
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from backnorm import BacknormError, batch_norm_backward, reference
from backnorm.conformance.judge import judge
from backnorm.dialects.aten import native_batch_norm_backward
from backnorm.dialects.paddle import batch_norm_grad
from backnorm.dialects.schema import REQUIRED

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
SHAPES = {2: (7, 3), 3: (3, 4, 5), 4: (2, 4, 3, 5), 5: (2, 3, 2, 3, 4)}
INPUTS = (
    "x", "scale", "bias", "mean_out", "variance_out", "saved_mean", "saved_variance",
    "reserve_space", "out_grad",
)  # fmt: skip


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
@pytest.mark.parametrize("types", TYPES.items())
def test_batch_norm_grad_with_flags_is_within_error_budget(
    batch, layout, types, is_test, use_global_stats, trainable_statistics
):
    shape = SHAPES[4] if layout == "NCHW" else (2, 3, 5, 4)
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


@pytest.mark.parametrize("shape", SHAPES.values())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_norm_grad_of_each_rank_has_the_bits_of_other_operators(batch, same, shape, layout):
    if layout == "NHWC":
        shape = (shape[0], *shape[2:], shape[1])
    b = batch(shape, LAYOUTS[layout])
    operands = inputs_of(b)
    first = [np.moveaxis(b[name], -1, 1) if layout == "NHWC" else b[name] for name in ("x", "dy")]
    saved = operands["saved_mean"], operands["saved_variance"]
    expected = list(
        native_batch_norm_backward(
            first[1], first[0], b["gamma"], None, None, *saved, True, EPSILON, [True] * 3
        )
    )
    if layout == "NHWC":
        expected[0] = np.moveaxis(expected[0], 1, -1)
    same(call(operands, data_format=layout), expected)
    same(
        call(inputs_of(b, True), data_format=layout, use_global_stats=True),
        batch_norm_backward(
            b["x"], b["dy"], b["mean"], b["variance"], b["gamma"],
            epsilon=F32_EPSILON, data_format=LAYOUTS[layout], training=False,
        ),
    )  # fmt: skip


def test_batch_norm_grad_without_scale_equals_scale_of_ones(b, same):
    operands = inputs_of(b)
    ones = call(operands | {"scale": np.ones_like(b["gamma"])})
    same(call(operands | {"scale": None}), ones)
    same(call(operands | {"scale": None, "bias": None}), ones)


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


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 3, 0), (2, 0, 4)])
def test_batch_norm_grad_of_no_elements_gives_zeros(batch, shape):
    b = batch(shape, "NCX")
    for frozen in (False, True):
        dx, dgamma, dbeta = call(inputs_of(b, frozen), use_global_stats=frozen)
        assert dx.shape == shape
        np.testing.assert_array_equal(dgamma, np.zeros_like(b["mean"]), strict=True)
        np.testing.assert_array_equal(dbeta, np.zeros_like(b["mean"]), strict=True)


def test_batch_norm_grad_signature_has_parameters_of_paddle():
    parameters = inspect.signature(batch_norm_grad).parameters
    attributes = ("momentum", "epsilon", "data_format", *FLAGS)
    assert list(parameters) == [*INPUTS, *attributes, "arithmetic"]
    assert {parameters[name].default for name in attributes} == {REQUIRED}


@pytest.mark.parametrize(
    ("match", "error", "changes"),
    [
        ("x: is a required input", TypeError, {"x": None}),
        ("out_grad: is a required input", TypeError, {"out_grad": None}),
        ("saved_mean: is a required input", TypeError, {"saved_mean": None}),
        ("saved_variance: is a required input", TypeError, {"saved_variance": None}),
        ("mean_out: is a required input", TypeError, {"mean_out": None, "is_test": True}),
        ("variance_out: is a required", TypeError,
         {"variance_out": None, "use_global_stats": True}),
        ("out_grad: must have the shape of x", ValueError, {"out_grad": np.ones((4, 3), "f")}),
        ("out_grad: must have the element type", TypeError, {"out_grad": np.ones((4, 3, 5))}),
        ("scale: must hold one value", ValueError, {"scale": np.ones(4, "f")}),
        ("bias: must have rank 1", ValueError, {"bias": np.ones((1, 3), "f")}),
        ("bias: element types do not match", TypeError, {"bias": np.ones(3)}),
        ("saved_mean: element types do not match", TypeError, {"saved_mean": np.ones(3, "f2")}),
        ("saved_variance: .*cannot be negative.*channel 1", ValueError,
         {"saved_variance": np.array([1, -1, 1], "f")}),
        ("variance_out: .*channel 2; got variance -1", ValueError,
         {"variance_out": np.array([1, 1, -1], "f"), "use_global_stats": True}),
        ("x: must have rank 2 to 5", ValueError,
         dict.fromkeys(("x", "out_grad"), np.ones(3, "f"))),
        ("x: must have rank 2 to 5", ValueError,
         dict.fromkeys(("x", "out_grad"), np.ones((1,) * 6, "f"))),
        ("x: unsupported element type", TypeError, {"x": np.ones((4, 3, 5), "i4")}),
        ("epsilon: must be finite and not negative", ValueError, {"epsilon": -0.5}),
        ("epsilon: is a required attribute", TypeError, {"epsilon": REQUIRED}),
        ("momentum: must be finite", ValueError, {"momentum": np.inf}),
        ("data_format: unknown value; got 'NCDHW'; expected 'NCHW' or 'NHWC'", ValueError,
         {"data_format": "NCDHW"}),
        *((f"{name}: must be a boolean", TypeError, {name: 1}) for name in FLAGS),
    ],
)  # fmt: skip
def test_batch_norm_grad_with_invalid_argument_raises_error_of_argument(b, match, error, changes):
    frozen = bool(changes.get("is_test") is True or changes.get("use_global_stats") is True)
    for _ in range(2):
        with pytest.raises(error, match=f"^{match}") as raised:
            call(inputs_of(b, frozen), **changes)
        assert isinstance(raised.value, BacknormError)


def test_batch_norm_grad_rejects_string_flag_and_accepts_numpy_bool(b):
    operands = inputs_of(b, True)
    with pytest.raises(TypeError, match=r"^use_global_stats: must be a boolean"):
        call(operands, use_global_stats="yes")
    assert call(operands, use_global_stats=np.True_)[0].shape == b["x"].shape
