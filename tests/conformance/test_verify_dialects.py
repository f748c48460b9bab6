"""`backnorm verify` calls an operator in the words of a dialect, and judges what it returns."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

import backnorm
from backnorm.conformance.judge import Quantity
from backnorm.conformance.ladder import RUNGS, is_at_least
from backnorm.conformance.verify.cases import DTYPES, Selection, recipes, selected
from backnorm.conformance.verify.conventions import Function, Permuted
from backnorm.conformance.verify.dialect_calls import arguments, schema_of
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import OPERATIONS
from backnorm.conformance.verify.peers import PEERS
from backnorm.conformance.verify.run import verify
from backnorm.conformance.verify.verdicts import graded
from backnorm.dialects import registry
from backnorm.dialects.schema import ELEMENT_TYPE_NAMES
from tests.support.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64

from .in_process import verified

# The rung of backnorm's default arithmetic.
OWN = {FLOAT64: "float64", FLOAT32: "float64", FLOAT16: "float32", BFLOAT16: "float32"}
EVERY = {
    (dialect, op): operator.schema
    for dialect in registry.DIALECTS
    for op, operator in registry.operators(dialect).items()
    if operator.schema.operation in OPERATIONS
}
# Operators differ in statistics, parameters, epsilon, types, numbers of axes and of elements.
SOME = "diagnostic-*", "frozen-*", "no-gamma-*", "one-element-*", "foreign-*", "grid-*epsilon-?-*"
SOME += "nan-in-*", "grid-0x*", "grid-?x??x?x?x?x?-*"
SMALL = Selection(
    dtypes=("float32",), layouts=("NCX",), only=("diagnostic-*", "frozen-*", "one-element-*")
)


def types_of(schema):
    """Return the element types of x that an operator takes, each with those of the statistics."""
    return {
        ELEMENT_TYPE_NAMES[rule.data]: {ELEMENT_TYPE_NAMES[name] for name in rule.channel}
        for rule in schema.type_rules
    }


@pytest.mark.parametrize(
    "only", [SOME, pytest.param((), marks=pytest.mark.long)], ids=["some", "all"]
)
@pytest.mark.parametrize(("dialect", "op"), EVERY)
def test_verify_of_operator_by_itself_has_no_finding_and_is_on_its_rung(dialect, op, only):
    schema = EVERY[dialect, op]
    selection = Selection(dtypes=tuple(DTYPES), operation=schema.operation, only=only)
    results = verified(Job(f"backnorm.dialects.{dialect}:{op}", selection, dialect=dialect, op=op))
    assert findings(results) == []
    judged = [v for v in results.verdicts if v.is_judged]
    assert [v for v in judged if not is_at_least(v.status, OWN[np.dtype(v.dtype)])] == []
    outputs = {tensor.role for tensor in schema.outputs} & {*get_args(Quantity)}
    assert {v.output for v in judged} == outputs
    drawn, taken = {recipe.variant[:2] for recipe in recipes(selection)}, types_of(schema)
    expected = {(x, beside) for x, beside in drawn if beside in taken.get(x, ())}
    assert {results.recipes[v.case].variant[:2] for v in judged} == expected


@pytest.mark.parametrize(
    ("dialect", "op", "frozen", "refused"),
    [
        # Results have the rank of x.
        ("cudnn", "BatchNormalizationBackward", (False,), "no frozen statistics"),
        ("directml", "BATCH_NORMALIZATION_TRAINING_GRAD", (False,), "no frozen statistics"),
        ("directml", "BATCH_NORMALIZATION_GRAD", (True,), "no statistics of training"),
        ("paddle", "batch_norm_grad", (False, True), "other results for such a case"),
    ],
)
def test_verify_of_dialect_judges_only_supported_statistics(dialect, op, frozen, refused):
    results = verify(Job(f"backnorm.dialects.{dialect}:{op}", SMALL, dialect=dialect, op=op))
    assert findings(results) == []
    judged = {v.case for v in results.verdicts if v.status in RUNGS}
    assert {"frozen" in case for case in judged} == set(frozen)
    judged_outputs = {v.output for v in results.verdicts if v.status in RUNGS}
    assert judged_outputs == {"dx", "dgamma", "dbeta"}
    assert any(refused in v.text for v in results.verdicts if v.status == "refused")


def test_verify_of_dialect_refuses_epsilon_0_if_its_range_is_positive():
    selection = replace(SMALL, only=("exact-*",), operation="forward")
    op = "BatchNormForwardTraining"
    results = verify(
        Job(f"backnorm.dialects.onednn_graph:{op}", selection, dialect="onednn_graph", op=op)
    )
    assert {v.text for v in results.verdicts} == {
        "epsilon: must be finite and positive; expected a number, finite and positive as float32"
    }
    assert {v.status for v in results.verdicts} == {"refused"}


def test_verify_of_dialect_with_unsupported_dtype_reports_refused():
    selection = replace(SMALL, dtypes=("float16", "bfloat16"), only=("realistic-*",))
    op = "BATCH_NORMALIZATION_TRAINING_GRAD"
    results = verify(Job(f"backnorm.dialects.directml:{op}", selection, dialect="directml", op=op))
    assert {v.text for v in results.verdicts} == {
        "Mean: element types do not match: Input has type f16; expected f16",
        "Input: unsupported element type; expected f32, f16",
    }
    assert {v.status for v in results.verdicts} == {"refused"}


@pytest.mark.parametrize(
    ("dialect", "operation", "absent"),
    [
        ("tensorflow", "backward", {"scale": 1.0}),
        ("stablehlo", "forward", {"scale": 1.0, "offset": 0.0}),
        ("aten", "backward", {"weight": None}),
    ],
)
def test_arguments_of_case_without_gamma_have_usual_values_only_if_required(
    dialect, operation, absent
):
    schema = schema_of(dialect, None, operation)
    selection = Selection(dtypes=("float32",), only=("no-gamma-*-NCX",), operation=operation)
    (case,) = selected(selection)
    inputs, _ = arguments(schema, case.inputs, case)
    for name, value in absent.items():
        expected = None if value is None else [value] * case.data.mean.size
        assert (inputs[name] if value is None else inputs[name].tolist()) == expected


@pytest.mark.parametrize(
    ("name", "operation"), [(name, each) for name, passes in PEERS.items() for each in passes]
)
def test_package_is_judged_by_the_numbers_that_its_operator_receives(name, operation):
    schema = Job(name, Selection(operation=operation)).schema
    found = None if schema is None else (schema.dialect, schema.operation)
    dialect = PEERS[name][operation].dialect
    assert found == (None if dialect is None else (dialect, operation))


def test_permuted_subject_gets_views_in_ncx_and_its_results_are_in_nxc():
    def backward(x, dy, mean, variance, gamma, *, epsilon):
        strides.append(x.strides)
        return backnorm.batch_norm_backward(x, dy, mean, variance, gamma, epsilon=epsilon)

    strides = []
    for case in selected(Selection(dtypes=("float32",), only=("realistic-*",))):
        outputs = Permuted(Function(backward))(case.inputs, case)
        assert {each.status for each in graded(case, outputs).values()} <= {*RUNGS}
    assert [min(each) == each[1] for each in strides] == [False, True]
