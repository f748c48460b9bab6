"""`backnorm verify` judges modules of flax, of linen and of nnx."""

from __future__ import annotations

from pathlib import Path

import pytest

from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify.cases import DTYPES, Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from tests.conformance import flax_layers
from tests.conformance.in_process import verified
from tests.conformance.layer_steps import WRONG

FILE = Path(flax_layers.__file__)


def found_in(subject, dtypes, *only):
    results = verified(Job(subject, Selection(dtypes=dtypes, only=only, operation="layer")))
    return results, findings(results)


@pytest.mark.parametrize("name", ["linen", "nnx"])
def test_verify_of_module_of_flax_has_no_finding_in_any_type(name):
    only = "training-float*", "training-bfloat16-*", "evaluation-*"
    results, found = found_in(f"flax.{name}:BatchNorm", tuple(DTYPES), *only)
    assert found == []
    assert {v.status for v in results.verdicts} <= {*RUNGS}
    assert {v.dtype for v in results.verdicts} == {*DTYPES}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LinenRight", None),
        ("NnxRight", None),
        ("OfPart", None),
        ("InTraining", "the layer has no argument that says that it is not in training"),
        ("instance", "the case has no beta"),
    ],
)
def test_verify_of_own_module_of_flax_has_no_finding(name, text):
    results, found = found_in(f"{FILE}:{name}", ("float32",), "diagnostic-*")
    assert found == []
    assert {v.text for v in results.verdicts if v.status not in RUNGS} == {text} - {None}


@pytest.mark.parametrize("kind", ["Linen", "Nnx"])
@pytest.mark.parametrize("name", WRONG)
def test_verify_of_wrong_module_of_flax_names_its_mistake(kind, name):
    _, found = found_in(f"{FILE}:{kind}{name}", ("float32",), "diagnostic-*")
    assert [each.says for each in found if each.id != "not_written"] == [WRONG[name]]
