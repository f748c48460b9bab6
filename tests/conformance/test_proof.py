"""A case proves something only if wrong formulas fail it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.audit import RIGHT
from backnorm.conformance.formula import BACKWARD, WRONG
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder, rungs
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS, Selection, selected
from backnorm.conformance.verify.operations import catches, proves
from backnorm.conformance.verify.verdicts import graded


def ladder_of(case):
    return GradientLadder.of(*case.operands, **case.options)


def case_of(*shape, dtype="float32"):
    (case,) = selected(Selection(dtypes=(dtype,), layouts=("NCX",), shapes=(shape,)))
    return case


def names_without_proof(selection):
    """Return the cases in which all wrong formulas pass by bounds that right kernels have."""
    found = []
    for case in selected(selection):
        if not case.data.x.size:
            continue
        ladder = ladder_of(case)
        known = rungs(ladder.data)
        best = "float32" if "float32" in known else "float64"
        for rung, kind in (("serial", "guaranteed"), (best, "expected")):
            if not proves(case, ladder, rung, kind):
                found.append((case.name, rung, kind))
    return found


def test_proves_is_true_for_each_smoke_case():
    assert names_without_proof(Selection(dtypes=tuple(DTYPES))) == []


def test_ladder_of_smoke_cases_rejects_each_mistake_and_no_right_kernel():
    missed = {*WRONG}
    for case in selected(Selection(dtypes=tuple(DTYPES))):
        if not case.data.x.size:
            continue
        ladder = ladder_of(case)

        def passes(kernel, case=case, ladder=ladder):
            gradients = kernel(*case.operands, **case.options)
            return all(
                ladder.grade(name, gradient).at_least("serial")
                for name, gradient in zip(GRADIENTS, gradients, strict=True)
            )

        assert all(passes(kernel(case.data.x.dtype)) for kernel in RIGHT.values()), case.name
        missed = {mistake for mistake in missed if passes(BACKWARD.wrong(mistake))}
    assert missed == set()


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_proves_is_true_for_each_full_case(dtype, layout):
    assert names_without_proof(Selection("full", (dtype,), (layout,))) == []


@pytest.mark.parametrize("shape", [(0, 3), (4, 3, 0), (0, 0), (4, 0, 2)])
def test_graded_right_outputs_without_elements_have_status_exact(shape):
    case = case_of(*shape)
    assert not proves(case, ladder_of(case))
    outputs = {name: np.zeros_like(case.data.like(name)) for name in ("dx", "dgamma", "dbeta")}
    assert {each.status for each in graded(case, outputs).values()} == {"exact"}


def test_graded_wrong_dbeta_without_elements_has_status_wrong():
    case = case_of(0, 3)
    ones = {name: np.ones_like(case.data.like(name)) for name in ("dx", "dgamma", "dbeta")}
    assert graded(case, ones)["dbeta"].status == "wrong"


def test_catches_of_one_element_are_subset_of_catches_of_two():
    one, two = (set(catches(case, ladder_of(case))) for case in (case_of(1, 3), case_of(2, 3)))
    assert "frozen" in one
    # The term along x is 0.
    assert "no-projection" not in one
    assert one < two


def test_verify_of_shape_without_elements_judges_results(tmp_path):
    report = tmp_path / "report.json"
    options = ["--dtypes", "float32", "--layouts", "NCX", "--json", str(report)]
    done = CliRunner().invoke(app, ["verify", "backnorm", "--shape", "0,3,2", *options])
    assert done.exit_code == 0
    assert json.loads(report.read_text())["counts"] == {"judged": 3, "passed": 3, "exact": 3}


def test_verify_with_invalid_shape_is_bad_usage():
    done = CliRunner().invoke(app, ["verify", "backnorm", "--shape", "4"])
    assert done.exit_code == 2
    assert "--shape" in done.output
