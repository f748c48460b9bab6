"""`backnorm verify` on other packages by name: no finding, and backnorm's errors are no larger.

verify runs each package in a process of its own.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.peers import PEERS, missing_package
from backnorm.conformance.verify.run import verify
from tests.support.required import require

pytestmark = [pytest.mark.peer, pytest.mark.long]

PASSES = [
    (name, operation)
    for name, passes in PEERS.items()
    for operation in passes
    if "-norm" not in operation
]
ROWS = [
    (name, operation)
    for name, passes in PEERS.items()
    for operation in passes
    if "-norm" in operation
]
# The packages that compile every shape, which takes seconds, or whose formula is inaccurate for a
# large mean.
FEW = ("torch-compiled", "tensorflow-xla", "jax")
# The layouts that a package refuses in float32.
REFUSED = {"onnxruntime": {"NXC"}}
# The cases in which a package ends its process (docs/conformance.md): an empty batch, and rank 6.
CRASHES = {
    "torch": ("grid-0x*",),
    "onednn": ("grid-*x2x3x2x*",),
    "onednn-graph": ("grid-*x2x3x2x*", "grid-0x*"),
}


def selection(operation, only=()):
    return Selection(dtypes=("float32",), operation=operation, only=only)


@cache
def errors_of_backnorm(operation):
    results = verify(Job("backnorm", selection(operation)))
    return {(v.case, v.output): v.grade.worst_ulp for v in results.verdicts if v.grade}


@pytest.mark.parametrize(("name", "operation"), PASSES)
def test_verify_of_package_has_no_finding_and_backnorm_is_as_accurate(name, operation):
    if name == "onnxruntime" and missing_package(name):
        pytest.skip("not installed: onnxruntime-training")
    require(missing_package(name) is None, missing_package(name))
    only = ("diagnostic-*", "no-gamma-*") if name in FEW else ()
    chosen = replace(selection(operation, only), skip=CRASHES.get(name, ()))
    results = verify(Job(name, chosen, timeout=120.0))
    assert findings(results) == []
    judged = [v for v in results.verdicts if v.grade is not None]
    assert {v.layout for v in judged} == {"NCX", "NXC"} - REFUSED.get(name, set())
    assert {v.output for v in judged} == {*results.operation.results} - {
        output for output in ("variance",) if name in ("torch", "onnxruntime")
    }
    own = errors_of_backnorm(operation)
    # A correctly rounded result is wrong by at most half a unit, which luck may beat.
    # Running statistics, which operators return, are no results of backnorm's function.
    compared = [v for v in judged if not v.output.startswith("running_")]
    worse = [v for v in compared if own[v.case, v.output] > max(v.grade.worst_ulp, 0.5)]
    assert worse == []


@pytest.mark.parametrize(("name", "operation"), ROWS)
def test_verify_of_another_normalisation_of_a_package_has_no_finding_on_usual_data(name, operation):
    require(missing_package(name) is None, missing_package(name))
    results = verify(Job(name, selection(operation, ("diagnostic-*", "realistic-*")), timeout=60.0))
    assert findings(results) == []
    # ATen's operators of a forward pass return the inverse deviation.
    absent = {"variance"} if "inverse_deviation" in results.operation.results else set()
    assert {v.output for v in results.verdicts if v.grade} == {*results.operation.results} - absent
