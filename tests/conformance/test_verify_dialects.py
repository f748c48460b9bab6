"""`backnorm verify` calls an operator in the words of a dialect, and judges what it returns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.run import Job, verify

SMALL = Selection(
    dtypes=("float32",), layouts=("NCX",), only=("diagnostic-*", "frozen-*", "one-element-*")
)


@pytest.mark.parametrize(
    ("dialect", "op", "frozen", "refused"),
    [
        # Results have the rank of x.
        ("cudnn", "BatchNormalizationBackward", (False,), "no frozen statistics"),
        ("directml", "BATCH_NORMALIZATION_TRAINING_GRAD", (False,), "no frozen statistics"),
        ("directml", "BATCH_NORMALIZATION_GRAD", (True,), "no statistics of training"),
        ("paddle", "batch_norm_grad", (False, True), "copies a batch of one element"),
    ],
)
def test_verify_of_dialect_judges_only_supported_statistics(dialect, op, frozen, refused):
    results = verify(Job(f"backnorm.dialects.{dialect}:{op}", SMALL, dialect, op))
    assert findings(results) == []
    judged = {v.case for v in results.verdicts if v.status in RUNGS}
    assert {"frozen" in case for case in judged} == set(frozen)
    judged_outputs = {v.output for v in results.verdicts if v.status in RUNGS}
    assert judged_outputs == {"dx", "dgamma", "dbeta"}
    assert any(refused in v.text for v in results.verdicts if v.status == "refused")


def test_verify_of_dialect_refuses_epsilon_0_if_its_range_is_positive():
    selection = replace(SMALL, only=("exact-*",), operation="forward")
    subject = f"{Path(__file__).with_name('configured.py')}:onednn_graph"
    results = verify(Job(subject, selection, "onednn_graph", "BatchNormForwardTraining"))
    assert {v.text for v in results.verdicts} == {"the operator takes only a positive epsilon"}
    assert {v.status for v in results.verdicts} == {"refused"}


def test_verify_of_dialect_with_unsupported_dtype_reports_refused():
    selection = replace(SMALL, dtypes=("float16", "bfloat16"), only=("realistic-*",))
    op = "BATCH_NORMALIZATION_TRAINING_GRAD"
    results = verify(Job(f"backnorm.dialects.directml:{op}", selection, "directml", op))
    assert {v.text for v in results.verdicts} == {
        f"the operator does not take x of {x} with statistics of float32"
        for x in ("float16", "bfloat16")
    }
    assert {v.status for v in results.verdicts} == {"refused"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--dialect", "caffe"), "dialect: unknown dialect; got 'caffe'; expected onednn_graph, "),
        (("--dialect", "aten", "--op", "batch_norm"),
         "op: unknown operator of aten; got 'batch_norm'; expected native_batch_norm_backward"),
        (("--dialect", "cann"),
         "dialect: has only parts of a gradient, which verify does not call; got cann; expected "),
        (("--op", "native_batch_norm_backward"),
         "--op: must be used with --dialect; got native_batch_norm_backward"),
    ],
)  # fmt: skip
def test_verify_with_invalid_operator_or_dialect_is_bad_usage(options, message):
    done = CliRunner().invoke(app, ["verify", "math:sqrt", *options])
    assert done.exit_code == 2
    assert done.stderr.strip().startswith(f"backnorm: error: {message}")


@pytest.mark.parametrize("subject", ["backnorm", "mine.so:backward"])
def test_verify_dialect_of_canonical_subject_is_bad_usage(subject):
    done = CliRunner().invoke(app, ["verify", subject, "--dialect", "ngraph"])
    assert done.exit_code == 2
    assert f"--dialect: must be absent with {subject}, which has the canonical" in done.stderr
