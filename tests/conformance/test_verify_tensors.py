"""`backnorm verify --tensors`: subjects get tensors of a framework, on a device."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import DTYPES, Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.renderers import RENDERERS
from backnorm.conformance.verify.report import Report
from backnorm.conformance.verify.run import verify
from backnorm.conformance.verify.tensors import on_tensors, tensors_of
from backnorm.errors import ArgumentValueError
from tests.support.required import require

from .in_process import verified

FILE = Path(__file__).with_name("device_subjects.py")
SMALL = Selection(dtypes=("float32",), layouts=("NCX",), only=("diagnostic-*", "one-element-*"))
ONE = Selection(dtypes=("float32",), only=("diagnostic-float32-float32-NCX",))
# A device whose tensors are copies: this PyTorch has none.
COPIES = """\
import torch
torch.Tensor.to = lambda self, *device: self.clone()
from tests.conformance.device_subjects import *
"""

pytestmark = pytest.mark.peer


@pytest.fixture(autouse=True)
def _torch(monkeypatch):
    require(find_spec("torch"), "torch")
    # The cases are small: a second thread of a worker would only wait.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def found_in(subject, selection=SMALL, *, run=verified, **options):
    results = run(Job(subject, selection, **{"tensors": "torch", **options}))
    return results, findings(results)


OPERATORS = {
    "native_batch_norm_backward": "native_batch_norm_backward",
    "batch_norm_backward": "batch_norm_backward",
    "_batch_norm_impl_index_backward": "_batch_norm_impl_index_backward",
    "native_batch_norm": "native_batch_norm",
    "_native_batch_norm_legit": "_native_batch_norm_legit",
    "_native_batch_norm_legit.no_stats": "_native_batch_norm_legit_no_stats",
    "_batch_norm_with_update": "_batch_norm_with_update",
}


@pytest.mark.parametrize("name", OPERATORS)
def test_verify_of_operator_of_pytorch_by_its_dispatcher_has_no_finding(name):
    operation = "backward" if name.endswith("backward") else "forward"
    # Without a float32 parameter, PyTorch rounds the mean of 16-bit numbers to 16 bits.
    only = ("diagnostic-*",) if operation == "forward" else ("diagnostic-*", "no-gamma-*")
    selection = Selection(dtypes=tuple(DTYPES), layouts=("NCX",), only=only, operation=operation)
    job = {"dialect": "aten", "op": OPERATORS[name]}
    results, found = found_in(f"torch:ops.aten.{name}", selection, **job)
    assert found == []
    outputs = ["running_mean", "running_variance"] * ("no_stats" not in name)
    for output in outputs if operation == "forward" else ["dx"]:
        judged = [v for v in results.verdicts if v.status in RUNGS and v.output == output]
        assert {v.dtype for v in judged} == {*DTYPES}


def test_verify_of_operator_that_updates_no_running_statistics_in_place_names_mistake():
    selection = replace(ONE, operation="forward")
    _, (finding,) = found_in(f"{FILE}:keeps_running", selection, dialect="aten")
    assert finding.says == "the running statistics are not updated"
    assert set(finding.outputs) == {"running_mean", "running_variance"}


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "framework", "operation"),
    [
        ("right", "torch", "backward"),
        ("right_forward", "torch", "forward"),
        ("right_of_jax", "jax", "backward"),
    ],
)
def test_verify_of_right_function_of_tensors_has_no_finding_in_any_type(name, framework, operation):
    require(find_spec(framework), framework)
    only = "diagnostic-*", "no-gamma-*", "one-element-*"
    selection = Selection(dtypes=tuple(DTYPES), only=only, operation=operation)
    # JAX and PyTorch need not share a process.
    run = verified if framework == "torch" else verify
    results, found = found_in(f"{FILE}:{name}", selection, tensors=framework, run=run)
    assert found == []
    assert {v.status for v in results.verdicts if v.output != "dgamma"} <= {*RUNGS}


@pytest.mark.parametrize("are_copies", [False, True])
def test_verify_of_function_that_writes_tensor_reports_changed_input(are_copies, tmp_path):
    (tmp_path / "copies.py").write_text(COPIES)
    place = tmp_path / "copies.py" if are_copies else FILE
    _, found = found_in(f"{place}:writes_dy", ONE, run=verify if are_copies else verified)
    assert [(each.id, each.says) for each in found] == [
        ("changed_input", "the subject writes to an input: dy")
    ]


def test_verify_of_function_that_reads_beyond_tensor_reports_crash():
    _, (finding, *others) = found_in(f"{FILE}:reads_beyond_dy", ONE, run=verify)
    assert finding.id == "crash"
    assert not others


def test_verify_of_function_that_changes_shape_of_its_tensor_has_no_finding():
    assert found_in(f"{FILE}:changes_shapes")[1] == []


def test_verify_reports_late_error_of_device_in_its_cases_only():
    results, (finding,) = found_in(f"{FILE}:fails_later", run=verify)
    assert finding.id == "crash"
    assert finding.says.endswith("RuntimeError: an illegal memory access was encountered")
    assert finding.cases == {"diagnostic-frozen-float32-float32-NCX"}
    others = [v.status for v in results.verdicts if v.case not in finding.cases]
    assert others
    assert {*others} <= {*RUNGS}


def test_finding_on_tensors_and_json_report_name_them():
    results, (finding,) = found_in(f"{FILE}:writes_dy", ONE, device="cpu:0")
    assert "--tensors torch --device cpu:0 --only" in finding.reproduce
    report = json.loads(RENDERERS["json"](Report.of(results)))
    assert (report["tensors"], report["device"]) == ("torch", "cpu:0")
    schema = json.loads(CliRunner().invoke(app, ["verify", "--schema"]).stdout)
    assert report.keys() == schema["properties"].keys()


@pytest.mark.parametrize("is_interpreted", [False, True])
def test_verify_of_function_that_fails_in_threads_reports_error_unless_interpreted(
    is_interpreted, monkeypatch
):
    monkeypatch.setenv("TRITON_INTERPRET", str(int(is_interpreted)))
    selection = replace(ONE, only=("realistic-*-NCX",))
    _, found = found_in(f"{FILE}:fails_in_threads", selection, timeout=10.0)
    assert [each.id for each in found] == ["error"] * (not is_interpreted)


def test_tensor_of_read_only_array_is_a_copy():
    array = np.ones(3)
    array.flags.writeable = False
    on_tensors(lambda tensor: [tensor.zero_()], tensors_of("torch", "cpu"))(array)
    assert array.tolist() == [1, 1, 1]


# --- the command ----------------------------------------------------------------------------------


def test_verify_on_wrong_device_is_bad_usage():
    done = CliRunner().invoke(
        app, ["verify", f"{FILE}:right", "--tensors", "jax", "--device", "nope"]
    )
    assert done.exit_code == 2
    assert "--device: jax cannot use it; got nope; expec" in done.output


@pytest.mark.parametrize("device", ["meta", "nope"])
def test_tensors_of_device_without_memory_or_unknown_raise_error_naming_it(device):
    with pytest.raises(ArgumentValueError, match=f"--device: torch cannot use it; got {device}; "):
        tensors_of("torch", device)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_tensors_of_missing_framework_raise_error_naming_it(framework, monkeypatch):
    monkeypatch.setitem(sys.modules, framework, None)
    with pytest.raises(ArgumentValueError, match=f"^--tensors: needs {framework}, which is not"):
        tensors_of(framework, "cpu")
