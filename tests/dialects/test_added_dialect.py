"""A new dialect passes the tests of all dialects once it is registered.

It has the operator of docs/how-to/add-a-dialect.md, one with a single layout, no attributes and an
inverse standard deviation, and one with an attribute that lists the reduced axes.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import tests.dialects.test_schema as of_schema
from backnorm import batch_norm_forward
from backnorm.cli import demo
from backnorm.cli.demo import LAYERS, run_demo
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.subjects import OfDialect, RefusedError
from backnorm.conformance.verify.verdicts import graded
from backnorm.dialects import registry, stablehlo
from backnorm.dialects.operator import Operator, by_name
from backnorm.dialects.schema import (
    REQUIRED,
    AttributeSpec,
    FormatSpec,
    OperatorSchema,
    channel,
    data,
)
from tests.crashers.cases import cases_of
from tests.support import calls
from tests.support.pages import run

from .test_values import calls_of, check_call

PAGE = run("docs/how-to/add-a-dialect.md", __name__="acme")
ON_PAGE = PAGE["norm_grad"]
(RULES,) = ON_PAGE.rules


class _PlainGrad(Operator):
    """Acme's `plain_grad`."""

    rules = (
        replace(
            RULES,
            op="plain_grad",
            inputs=(*RULES.inputs[:-1], channel("saved_inv_std", "inverse_deviation", "f32")),
            attributes=(),
            formats=(FormatSpec("N...C", "NXC"),),
        ),
    )

    def __call__(
        self,
        top_grad=None,
        bottom=None,
        scale=None,
        saved_mean=None,
        saved_inv_std=None,
        *,
        arithmetic=None,
    ):
        """Gradients of batch normalisation."""
        inputs = top_grad, bottom, scale, saved_mean, saved_inv_std
        return self._run(inputs, arithmetic=arithmetic)


class _AxesGrad(Operator):
    """Acme's `axes_grad`."""

    rules = (
        replace(
            RULES,
            op="axes_grad",
            attributes=(
                AttributeSpec("eps", "f32", role="epsilon", range="not negative"),
                AttributeSpec("reduced", "axes", role="reduced_axes", usual=(0, 2, 3)),
            ),
            formats=(FormatSpec("any axes", "NCX", is_any=True),),
        ),
    )

    def __call__(
        self,
        top_grad=None,
        bottom=None,
        scale=None,
        saved_mean=None,
        saved_var=None,
        eps=REQUIRED,
        reduced=REQUIRED,
        *,
        arithmetic=None,
    ):
        """Gradients of batch normalisation."""
        inputs = top_grad, bottom, scale, saved_mean, saved_var
        return self._run(inputs, (eps, reduced), arithmetic=arithmetic)


@pytest.fixture(params=[ON_PAGE, _PlainGrad(), _AxesGrad()], ids=["on_page", "plain", "axes"])
def acme(monkeypatch, request):
    """Register acme beside a dialect of each statistic, and return acme's operators by name."""
    found = by_name(request.param)
    monkeypatch.setitem(sys.modules, "acme", SimpleNamespace(OPERATORS=found))
    others = {name: registry.DIALECTS[name] for name in ("ngraph", "cudnn")}
    dialects = {"acme": "acme", **others}
    for module in (registry, calls):
        monkeypatch.setattr(module, "DIALECTS", dialects)
    return found


def test_dialect_page_module_exports_its_operators():
    assert {*PAGE["__all__"]} == {"OPERATORS", *PAGE["OPERATORS"]}


def test_added_dialect_passes_schema_tests(acme):
    for op, found in acme.items():
        of_schema.test_operator_has_own_docstring_and_literal_types_of_choices("acme", op)
        of_schema.test_call_parameters_have_the_names_order_and_defaults_of_the_table("acme", op)
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
        assert {status for status, *_ in graded(case, outputs).values()} <= set(RUNGS)
        layouts.add(case.data.data_format)
    assert layouts == ({"NXC"} if op == "plain_grad" else {"NCX", "NXC"})


class _Forward(Operator):
    """Acme's `norm`, which returns running statistics and the inverse standard deviation."""

    rules = (
        OperatorSchema(
            dialect="acme",
            op="norm",
            operation="forward",
            source="Acme operator guide 1.2, {op}",
            inputs=(
                data("x", "x", "T"),
                channel("scale", "gamma", "f32"),
                channel("shift", "beta", "f32"),
                channel("mean", "running_mean", "f32"),
                channel("var", "running_variance", "f32"),
            ),
            outputs=(
                data("y", "y", "T"),
                channel("new_mean", "running_mean", "f32"),
                channel("new_var", "running_variance", "f32"),
                channel("saved_mean", "mean", "f32"),
                channel("saved_inv_std", "inverse_deviation", "f32"),
            ),
            attributes=(AttributeSpec("eps", "f32", role="epsilon", range="not negative"),),
            type_rules=RULES.type_rules,
            formats=(FormatSpec("NCHW", "NCX"),),
        ),
    )

    def __call__(
        self, x=None, scale=None, shift=None, mean=None, var=None, eps=1e-5, *, arithmetic=None
    ):
        """Batch normalisation."""
        return self._run((x, scale, shift, mean, var), (eps,), arithmetic=arithmetic)


class _WeightedForward(_Forward):
    rules = _Forward.rules

    @classmethod
    def translate(cls, call):
        return replace(super().translate(call), weight=0.25)


FORWARD = (
    np.random.default_rng(0).standard_normal((6, 3, 5)).astype(np.float32),
    *np.ones((4, 3), np.float32),
)


def test_forward_operator_without_weight_of_running_statistics_raises():
    message = "^acme.norm: no result has the role running_mean of new_mean: `translate` must set"
    with pytest.raises(ValueError, match=message):
        _Forward()(*FORWARD)


def test_forward_operator_returns_inverse_deviation_and_running_statistics():
    x, scale, shift, mean, var = FORWARD
    y, new_mean, new_var, saved_mean, inverse = _WeightedForward()(*FORWARD)
    expected = batch_norm_forward(x, scale, shift, epsilon=float(np.float32(1e-5)))
    np.testing.assert_array_equal(y, expected.y)
    np.testing.assert_array_equal(saved_mean, expected.mean)
    wide = x.astype(float).transpose(1, 0, 2).reshape(3, -1)
    np.testing.assert_allclose(inverse, 1 / np.sqrt(wide.var(1) + 1e-5), rtol=1e-7)
    np.testing.assert_allclose(new_mean, 0.75 * mean + 0.25 * wide.mean(1), rtol=1e-6)
    np.testing.assert_allclose(new_var, 0.75 * var + 0.25 * wide.var(1), rtol=1e-6)


class _AxisGrad(type(stablehlo.batch_norm_grad)):
    """StableHLO's operator, with a channel axis that may be counted from the end."""

    rules = (
        replace(
            stablehlo.batch_norm_grad.rules[0],
            attributes=(
                AttributeSpec("epsilon", "f32", role="epsilon"),
                AttributeSpec("feature_index", "i64", role="channel_axis"),
            ),
        ),
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_negative_channel_axis_counts_from_the_end(axis):
    x, dy = np.random.default_rng(0).standard_normal((2, 3, 4, 5), dtype=np.float32)
    statistics = np.ones((3, x.shape[axis]), np.float32)
    first, second = (_AxisGrad()(x, *statistics, dy, 1e-5, k) for k in (axis, axis - 3))
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("axis", [-4, 3])
def test_channel_axis_beyond_rank_raises_value_error(axis):
    x = np.ones((3, 4, 5), np.float32)
    message = f"^feature_index: must be an axis of operand; got {axis} .* -3 to 2"
    with pytest.raises(ValueError, match=message):
        _AxisGrad()(x, *np.ones((3, 5), np.float32), x, 1e-5, axis)
