"""A new dialect passes the tests of all dialects once it is registered.

It has the operator of docs/how-to/add-a-dialect.md, one with a single layout, no attributes and an
inverse standard deviation, and one with an attribute that lists the reduced axes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated

import numpy as np
import pytest

import tests.dialects.test_schema as of_schema
from backnorm import batch_norm_forward
from backnorm.cli import demo
from backnorm.cli.demo import LAYERS, run_demo
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.conventions import OfDialect
from backnorm.conformance.verify.operations import RefusedError
from backnorm.conformance.verify.verdicts import graded
from backnorm.dialects import registry, stablehlo
from backnorm.dialects.operator import operator
from backnorm.dialects.roles import attribute, channel, data
from backnorm.dialects.schema import FormatSpec
from tests.crashers.cases import cases_of
from tests.support import calls
from tests.support.pages import run

from .test_values import calls_of, check_call

PAGE = run("docs/how-to/add-a-dialect.md", __name__="acme")
RULES, GRADIENTS = PAGE["RULES"], PAGE["norm_grad"].operator.schema.outputs
RESULTS = {tensor.name: tensor for tensor in GRADIENTS}
TopGrad = Annotated[np.ndarray, data("dy", "T")]
Bottom = Annotated[np.ndarray, data("x", "T")]
Scale = Annotated[np.ndarray, channel("gamma", "f32")]
Mean = Annotated[np.ndarray, channel("mean", "f32")]
Variance = Annotated[np.ndarray, channel("variance", "f32")]
InvStd = Annotated[np.ndarray, channel("inverse_deviation", "f32")]
Epsilon = Annotated[float, attribute("f32", "epsilon", range="not negative")]


@operator(replace(RULES, formats=(FormatSpec("N...C", "NXC"),)), "backward", **RESULTS)
def plain_grad(
    top_grad: TopGrad,
    bottom: Bottom,
    scale: Scale,
    saved_mean: Mean,
    saved_inv_std: InvStd,
    *,
    arithmetic=None,
):
    """Gradients of batch normalisation."""


@operator(
    replace(RULES, formats=(FormatSpec("any axes", "NCX", is_any=True),)), "backward", **RESULTS
)
def axes_grad(
    top_grad: TopGrad,
    bottom: Bottom,
    scale: Scale,
    saved_mean: Mean,
    saved_var: Variance,
    eps: Epsilon,
    reduced: Annotated[tuple, attribute("axes", "reduced_axes")],
    *,
    arithmetic=None,
):
    """Gradients of batch normalisation."""


@pytest.fixture(params=[PAGE["norm_grad"], plain_grad, axes_grad], ids=lambda f: f.__name__)
def acme(monkeypatch, request):
    """Register acme beside a dialect of each statistic, and return acme's operators by name."""
    found = {request.param.__name__: request.param}
    monkeypatch.setitem(sys.modules, "acme", SimpleNamespace(**found))
    others = {name: registry.DIALECTS[name] for name in ("ngraph", "cudnn")}
    dialects = {"acme": "acme", **others}
    for module in (registry, calls):
        monkeypatch.setattr(module, "DIALECTS", dialects)
    return registry.operators("acme")


def test_dialect_page_module_exports_its_operators():
    assert PAGE["__all__"] == ["norm_grad"]


def test_added_dialect_passes_schema_tests(acme):
    for op, found in acme.items():
        of_schema.test_schema_has_the_names_of_its_dialect_and_operator_in_the_registry("acme", op)
        of_schema.test_schema_to_dict_returns_plain_json(found.schema)
        of_schema.test_schema_has_unique_names_summary_and_valid_defaults(found.schema)


def test_added_dialect_has_the_bits_of_its_canonical_calls(acme):
    for found in acme.values():
        for call in calls_of(calls.Subject(found.schema)):
            check_call(*call)


def test_added_dialect_passes_crasher_cases(acme):
    for subject in calls.dialect_subjects():
        if subject.name.startswith("acme"):
            outcomes = {case.name: case.outcome() for case in cases_of(subject)}
            assert len(outcomes) > 40
            assert {*outcomes.values()} == {"error", "result"}, outcomes


def test_added_dialect_passes_demo_in_both_layouts(acme, monkeypatch):
    monkeypatch.setattr(demo, "LAYERS", LAYERS[:1])
    report = run_demo()
    assert report.passed, report.verdict
    rows = {(row.layout, row.dtype) for row in report.rows if row.dialect == "acme"}
    assert rows == {(layout, t) for layout in ("NCX", "NXC") for t in ("float32", "float16")}


def test_added_dialect_passes_verify_in_its_layouts(acme):
    selection = Selection(dtypes=("float32",), only=("realistic-float32-float32-*",))
    layouts = set()
    for case in selected(selection):
        (op,) = acme
        subject = OfDialect(acme[op], acme[op].schema)
        try:
            outputs = subject(case.inputs, case)
        except RefusedError:
            continue
        assert {each.status for each in graded(case, outputs).values()} <= set(RUNGS)
        layouts.add(case.data.data_format)
    assert layouts == ({"NXC"} if op == "plain_grad" else {"NCX", "NXC"})


def norm(
    x: Annotated[np.ndarray, data("x", "T")],
    scale: Scale,
    shift: Annotated[np.ndarray, channel("beta", "f32")],
    mean: Annotated[np.ndarray, channel("running_mean", "f32")],
    var: Annotated[np.ndarray, channel("running_variance", "f32")],
    eps: Epsilon = 1e-5,
    *,
    arithmetic=None,
):
    """Batch normalisation, which returns running statistics and the inverse deviation."""


def declared(function, **options):
    return operator(
        replace(RULES, formats=(FormatSpec("NCHW", "NCX"),)),
        "forward",
        **options,
        y=data("y", "T"),
        new_mean=channel("running_mean", "f32"),
        new_var=channel("running_variance", "f32"),
        saved_mean=channel("mean", "f32"),
        saved_inv_std=channel("inverse_deviation", "f32"),
    )(function)


FORWARD = (
    np.random.default_rng(0).standard_normal((6, 3, 5)).astype(np.float32),
    *np.ones((4, 3), np.float32),
)


def test_forward_operator_without_weight_of_running_statistics_raises():
    message = "^acme.norm: no result has the role running_mean of new_mean: an attribute must"
    with pytest.raises(ValueError, match=message):
        declared(norm)(*FORWARD)


def test_forward_operator_returns_inverse_deviation_and_running_statistics():
    def weighted(call, canonical):
        return replace(canonical, weight=0.25)

    x, scale, shift, mean, var = FORWARD
    y, new_mean, new_var, saved_mean, inverse = declared(norm, translate=weighted)(*FORWARD)
    expected = batch_norm_forward(x, scale, shift, epsilon=float(np.float32(1e-5)))
    np.testing.assert_array_equal(y, expected.y)
    np.testing.assert_array_equal(saved_mean, expected.mean)
    wide = x.astype(float).transpose(1, 0, 2).reshape(3, -1)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(wide.var(1) + 1e-5), rtol=1e-7)
    np.testing.assert_allclose(new_mean, 0.75 * mean + 0.25 * wide.mean(1), rtol=1e-6)
    np.testing.assert_allclose(new_var, 0.75 * var + 0.25 * wide.var(1), rtol=1e-6)


@operator(stablehlo.RULES, "backward", **RESULTS)
def axis_grad(
    operand: Annotated[np.ndarray, data("x", "T")],
    scale: Annotated[np.ndarray, channel("gamma", "T")],
    mean: Annotated[np.ndarray, channel("mean", "T")],
    variance: Annotated[np.ndarray, channel("variance", "T")],
    grad_output: Annotated[np.ndarray, data("dy", "T")],
    epsilon: Epsilon,
    feature_index: Annotated[int, attribute("i64", "channel_axis")],
):
    """StableHLO's operator, with a channel axis that may be counted from the end."""


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_negative_channel_axis_counts_from_the_end(axis):
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 4, 5), dtype=np.float32)
    statistics = np.ones((3, x.shape[axis]), np.float32)
    first, second = (axis_grad(x, *statistics, dy, 1e-5, k) for k in (axis, axis - 3))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axis", [-4, 3])
def test_channel_axis_beyond_rank_raises_value_error(axis):
    x = np.ones((3, 4, 5), np.float32)
    message = f"^feature_index: must be an axis of operand; got {axis} .* -3 to 2"
    with pytest.raises(ValueError, match=message):
        axis_grad(x, *np.ones((3, 5), np.float32), x, 1e-5, axis)
