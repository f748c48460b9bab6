"""`backnorm verify --operation forward`: wrong forward passes are named, right ones are graded."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.data import LayerData
from backnorm.conformance.diagnosis import diagnose_forward, forward_diagnostic_data
from backnorm.conformance.formula import FORWARD, FORWARD_MISTAKES, Channels
from backnorm.conformance.judge import FORWARD_RESULTS
from backnorm.conformance.ladder import RUNGS, is_at_least
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.operations import OPERATIONS, proves
from backnorm.conformance.verify.options import Options
from backnorm.conformance.verify.report import Report
from backnorm.conformance.verify.run import verify
from backnorm.conformance.verify.subjects import subject_of
from tests.support.dtypes import ELEMENT_TYPES, FLOAT32, FLOAT64
from tests.support.required import require

from . import forward_subjects
from .forward_subjects import RIGHT, SPECIAL, WRONG, WRONG_OPERATORS
from .in_process import verified

FILE = Path(__file__).with_name("forward_subjects.py")
ONLY = "diagnostic-*", "realistic-*", "mean-over-deviation-*", "no-gamma-*", "constant-channels-*"
SMALL = Selection(dtypes=("float32",), only=ONLY, operation="forward")
QUICK = ("bessel", "gamma_and_beta_swapped", "one_pass", "cached")
QUICK_RIGHT = ("float64_sums", "pairs_folded", "serial_shifted", "Welford", "Chan_in_blocks")


def found_in(name, selection=SMALL, **options):
    results = verified(Job(f"{FILE}:{name}", selection, **options))
    return results, findings(results)


def quick(names, few):
    return [name if name in few else pytest.param(name, marks=pytest.mark.long) for name in names]


# --- subjects -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", quick(WRONG, QUICK))
def test_verify_of_wrong_forward_reports_expected_finding(name):
    results, found = found_in(name)
    assert WRONG[name] in {each.id for each in found}, [each.id for each in found]
    assert all("--operation forward" in each.reproduce for each in found)
    assert Report.of(results).counts["judged"]


@pytest.mark.parametrize("name", quick(SPECIAL, ("nan_as_zero", "of_rank_5", "same_arrays")))
def test_verify_of_forward_that_is_wrong_in_special_cases_has_finding(name):
    _, found = found_in(name, Selection(dtypes=("float32",), operation="forward"))
    assert found


def test_verify_of_one_element_forward_does_not_report_stale_y(tmp_path):
    subject = tmp_path / "mine.py"
    subject.write_text(
        "from backnorm import batch_norm_forward\n"
        "def f(*inputs, **options):\n"
        "    return batch_norm_forward(*inputs, **options)[0], None, None\n"
    )
    selection = Selection(dtypes=("float32",), only=("one-element-*",), operation="forward")
    results = verified(Job(f"{subject}:f", selection))
    assert {v.status for v in results.verdicts if v.output == "y"} <= {*RUNGS, "proves_nothing"}


@pytest.mark.parametrize("name", quick(RIGHT, QUICK_RIGHT))
def test_verify_right_forward_is_on_its_rung_or_a_better_one(name):
    results, found = found_in(name)
    assert found == []
    rung = "serial" if RIGHT[name].shifted else RIGHT[name].rung
    assert [v for v in results.verdicts if not is_at_least(v.status, rung)] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["right", *RIGHT])
def test_verify_of_right_forward_in_float32_and_16_bits_has_no_finding(name):
    dtypes = "float32", "bfloat16", "float16"
    _, found = found_in(name, Selection(dtypes=dtypes, operation="forward"))
    assert found == []


def test_verify_of_one_pass_forward_reports_only_large_mean():
    results, found = found_in("one_pass")
    wrong = {v.case for v in results.verdicts if v.status not in RUNGS}
    assert {each.partition("-float32")[0] for each in wrong} == {"mean-over-deviation-10000"}
    assert all("mean-over-deviation-10000" in each.says for each in found)


@pytest.mark.parametrize(
    "name", ["backnorm", "numpy", pytest.param("torch", marks=pytest.mark.peer)]
)
def test_verify_forward_of_a_package_has_no_finding(name):
    if name == "torch":
        require(find_spec("torch"), "torch")
    results = verify(Job(name, SMALL))
    assert findings(results) == []
    assert Report.of(results).counts["passed"] >= 20


def test_verify_of_forward_with_wrong_dtype_reports_it(tmp_path):
    subject = tmp_path / "narrow.py"
    subject.write_text(
        "from backnorm import batch_norm_forward as f\n"
        "def forward(*a, **k):\n y, m, v = f(*a, **k)\n return y, m, v.astype('f2')\n"
    )
    results = verified(Job(f"{subject}:forward", SMALL))
    texts = {v.text for v in results.verdicts if v.output == "variance"}
    assert any("; got float16 of shape" in text for text in texts)


# --- dialects -------------------------------------------------------------------------------------


def test_verify_of_forward_by_running_statistics_reports_them():
    selection = Selection(
        dtypes=("float32",), only=("diagnostic-*", "realistic-*"), operation="forward"
    )
    options = {"dialect": "onednn_graph", "op": "BatchNormForwardTraining"}
    _, found = found_in("running_statistics", selection, **options)
    assert "running-statistics" in {each.id for each in found}


def test_verify_of_returned_running_statistics_passes_in_none_of_the_cases():
    selection = Selection(dtypes=("float32",), skip=("grid-0x*",), operation="forward")
    options = {"dialect": "onednn_graph", "op": "BatchNormForwardTraining"}
    results, _ = found_in("running_returned_as_saved", selection, **options)
    for output in ("mean", "variance"):
        statuses = [v.status for v in results.verdicts if v.output == output]
        assert statuses.count("wrong") >= 18
        assert not {*statuses} & {*RUNGS}


@pytest.mark.parametrize("name", WRONG_OPERATORS)
def test_verify_of_wrong_operator_reports_expected_finding(name):
    dialect, expected = WRONG_OPERATORS[name]
    _, found = found_in(name, dialect=dialect)
    assert found[0].id == expected, [each.says for each in found]


@pytest.mark.parametrize(
    ("dialect", "op", "message"),
    [
        ("cudnn", None, "dialect: has no forward pass in training"),
        ("tensorflow", "FusedBatchNormGradV3", "op: must be a forward pass"),
    ],
)
def test_subject_of_dialect_without_forward_raises_value_error(dialect, op, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        subject_of("math:sqrt", "forward", Options(dialect=dialect, op=op))


# --- the command ----------------------------------------------------------------------------------


def test_verify_forward_command_names_the_mistake():
    done = CliRunner().invoke(
        app,
        ["verify", f"{FILE}:bessel", "--operation", "forward", "--dtypes", "float32",
         "--only", "diagnostic-*", "--json", "-"],
    )  # fmt: skip
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert report["findings"][0]["says"] == "the variance is divided by M - 1, not by M"
    assert report["findings"][0]["outputs"] == ["y", "variance"]
    assert {v["output"] for v in report["verdicts"]} == {"y", "mean", "variance"}


@pytest.mark.parametrize(
    ("operation", "options"),
    [("layer", ["--command", "true {inputs} {outputs}"]), ("layer", ["lib.so:f"]),
     ("forward", ["jax"])],
)  # fmt: skip
def test_verify_of_subject_without_the_operation_is_bad_usage(operation, options):
    done = CliRunner().invoke(app, ["verify", "--operation", operation, *options])
    assert done.exit_code == 2, done.output


# --- diagnosis ------------------------------------------------------------------------------------


def outputs_of(mistakes, data):
    return dict(FORWARD.wrong(*mistakes).outputs(data, Channels.of(data, wide=True)))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
@pytest.mark.parametrize("mistake", FORWARD_MISTAKES, ids=lambda mistake: mistake.name)
def test_diagnose_forward_with_mistake_returns_its_name(mistake, dtype):
    unbiased = mistake.name == "running-variance-biased"
    data = replace(forward_diagnostic_data(dtype), momentum=0.25, unbiased=unbiased)
    found = diagnose_forward(data, outputs_of((mistake,), data))
    assert (found.kind, found.names, found.says) == ("formula", (mistake.name,), mistake.says)


@pytest.mark.parametrize("data_format", ["NCX", "NXC"])
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_forward_of_right_outputs_returns_right(dtype, data_format):
    data = forward_diagnostic_data(dtype, data_format=data_format)
    assert diagnose_forward(data, outputs_of((), data)).kind == "right"


def test_diagnose_forward_of_float64_outputs_computed_in_float32_returns_few_bits():
    data = forward_diagnostic_data(FLOAT64)
    right = outputs_of((), data)
    outputs = {n: right[n].astype(np.float32).astype(float) for n in FORWARD_RESULTS}
    found = diagnose_forward(data, outputs)
    assert (found.kind, found.names) == ("precision", ("few-bits",))
    assert found.says.startswith("y, the mean and the variance are right to 2")


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", ELEMENT_TYPES, ids=str)
def test_diagnose_forward_of_right_results_on_random_data_returns_right(dtype, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 9, rng.integers(2, 6)).tolist())
    x = rng.standard_normal(shape) * 10.0 ** rng.uniform(-2, 2) + rng.choice([0.0, 3.0, -50.0])
    channels = shape[1]
    statistics = FLOAT32 if dtype.itemsize == 2 else dtype
    parameters = (rng.standard_normal(channels).astype(statistics) for _ in range(4))
    data = LayerData(x.astype(dtype), x.astype(dtype), *parameters, 1e-5, "NCX")
    # The other kernels compute in float32.
    for name in ("right", *RIGHT) if dtype != FLOAT64 else ("right",):
        outputs = getattr(forward_subjects, name)(data.x, data.gamma, data.beta, **data.options)
        named = dict(zip(("y", "mean", "variance"), outputs, strict=True))
        assert diagnose_forward(data, named).kind == "right", name


def test_diagnose_forward_of_unknown_factor_reports_its_value():
    data = forward_diagnostic_data(FLOAT32)
    outputs = outputs_of((), data)
    found = diagnose_forward(data, outputs | {"variance": outputs["variance"] * np.float32(0.7)})
    assert found.says == "the variance is 0.7 times what it should be in every channel"


# --- cases ----------------------------------------------------------------------------------------


def test_proves_is_true_for_each_forward_case():
    for case in selected(Selection(operation="forward", skip=("grid-0x*",))):
        assert proves(case, OPERATIONS["forward"].ladder(case)), case.name


def test_verify_of_forward_without_elements_judges_results():
    selection = Selection(dtypes=("float32",), shapes=((0, 3, 2),), operation="forward")
    results = verified(Job(f"{FILE}:right", selection))
    assert {v.status for v in results.verdicts} == {"exact"}


def test_diagnose_forward_of_wrong_last_elements_reports_them():
    data = forward_diagnostic_data(FLOAT32)
    outputs = outputs_of((), data)
    outputs["y"] = np.ascontiguousarray(outputs["y"])
    outputs["y"].reshape(-1)[360:] = 0
    found = diagnose_forward(data, outputs)
    assert found.says == "the last 3 of the 363 elements of y in memory are 0; the rest is right"
