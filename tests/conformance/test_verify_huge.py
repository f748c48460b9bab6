"""A case of repeated channels: each copy is judged, and too little memory is no crash."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import backnorm
from backnorm.conformance.ladder import RUNGS
from backnorm.conformance.verify._memory import available_bytes, repeated, worst_parts
from backnorm.conformance.verify.cases import Selection, selected
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.run import verify

MANY = 1 << 20
SUBJECT = """
from dataclasses import replace

import numpy as np
import backnorm

def right(x, dy, mean, variance, gamma, **options):
    return backnorm.batch_norm_backward(x, dy, mean, variance, gamma, **options)

def wraps(x, dy, mean, variance, gamma, **options):
    dx, dgamma, dbeta = right(x, dy, mean, variance, gamma, **options)
    if x.size > 2**20:
        dx.reshape(-1)[2**20:] = dx.reshape(-1)[:x.size - 2**20] * 0.5
    return dx, dgamma, dbeta

def skips_last_channel(x, dy, mean, variance, gamma, **options):
    dx, dgamma, dbeta = right(x, dy, mean, variance, gamma, **options)
    dbeta[-1] = np.nan
    return dx, dgamma, dbeta

def hungry(x, dy, mean, variance, gamma, **options):
    np.ones(1 << 36)
    return right(x, dy, mean, variance, gamma, **options)
"""


def selection(operation="backward"):
    return Selection(
        dtypes=("bfloat16",),
        layouts=("NCX",),
        only=("beyond-int32-*",),
        operation=operation,
        huge=MANY,
    )


@pytest.fixture
def subject(tmp_path):
    path = tmp_path / "subject.py"
    path.write_text(SUBJECT)
    return lambda name: f"{path}:{name}"


def statuses(results):
    return {v.output: v.status for v in results.verdicts}


def test_huge_case_exceeds_limit_and_is_selected_only_on_demand():
    (case,) = selected(selection())
    large = repeated(case)
    assert large.data.x.size > MANY >= large.data.x.size - case.data.x.size
    assert large.data.x.shape[1] == large.data.mean.size == 64 * case.repeats
    assert not list(selected(Selection(only=("beyond-int32-*",))))
    with_shapes = replace(selection(), shapes=((2, 3, 4),))
    assert [each.name for each in selected(with_shapes)] == [case.name]


def test_backward_of_repeated_channels_has_the_bits_of_small_case():
    (case,) = selected(selection())
    large = repeated(case)
    many = backnorm.batch_norm_backward(*large.operands, **large.options)
    few = backnorm.batch_norm_backward(*case.operands, **case.options)
    names = "dx", "dgamma", "dbeta"
    for name, part in worst_parts(dict(zip(names, many, strict=True)), case).items():
        np.testing.assert_array_equal(part, few[names.index(name)])


@pytest.mark.parametrize("operation", ["backward", "forward"])
def test_verify_of_backnorm_in_huge_case_passes(operation):
    results = verify(Job("backnorm", selection(operation)))
    assert len(results.verdicts) == 3
    assert {v.status for v in results.verdicts} <= set(RUNGS)


@pytest.mark.parametrize(
    ("name", "wrong"), [("wraps", {"dx": "wrong"}), ("skips_last_channel", {"dbeta": "nonfinite"})]
)
def test_verify_in_huge_case_reports_mistake_in_later_copy(name, wrong, subject):
    found = statuses(verify(Job(subject(name), selection())))
    assert {n: s for n, s in found.items() if s not in RUNGS} == wrong


def test_verify_of_subject_beyond_memory_reports_out_of_memory(subject):
    results = verify(Job(subject("hungry"), selection()))
    assert set(statuses(results).values()) == {"out_of_memory"}
    assert findings(results)[0].reproduce.endswith("--show")


def test_verify_of_huge_case_beyond_available_memory_reports_refused(subject):
    many = Selection(
        dtypes=("bfloat16",), layouts=("NCX",), only=("beyond-int32-*",), huge=available_bytes()
    )
    results = verify(Job(subject("right"), many))
    assert set(statuses(results).values()) == {"refused"}
    assert all("GiB that are available" in v.text for v in results.verdicts)
