"""Right subjects are never wrong, and on their own rung where data part it from a better one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import RUNGS, GradientLadder, is_at_least
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS, Selection, selected
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.run import Job, verify
from tests.support.dtypes import BFLOAT16

from .right_subjects import SUBJECTS, probability_of_own_rung

FILE = Path(__file__).with_name("right_subjects.py")
WRONG_FILE = Path(__file__).with_name("wrong_subjects.py")
# A case counts if it shows the rung with a probability of at least `LIKELY`.
LIKELY, SHARE = 0.97, 0.95
OPTIONS = {"epsilon": 1e-5, "data_format": "NXC", "training": True}


class Shown(NamedTuple):
    """The worst rung of a subject's outputs in a case, and whether the case shows its own."""

    case: str
    status: str
    own: str
    is_parted: bool

    @classmethod
    def of(cls, subject, case, ladder, statuses):
        worst = max(statuses, key=[*RUNGS, "wrong", "nonfinite"].index)
        likely = probability_of_own_rung(subject, case, ladder)
        return cls(case.name, worst, subject.rung(ladder.data), likely >= LIKELY)


def check_rungs(found):
    """Fail unless each case has the subject's rung or a better one, and its own where it shows."""
    assert [each for each in found if not is_at_least(each.status, each.own)] == []
    parted = [each for each in found if each.is_parted]
    others = [each for each in parted if each.status != each.own]
    assert len(others) <= (1 - SHARE) * len(parted), others


def check_through_verify(name, selection):
    results = verify(Job(f"{FILE}:{name}", selection, any_order=name == "atomics"))
    assert findings(results) == []
    statuses = {}
    for verdict in results.verdicts:
        statuses.setdefault(verdict.case, []).append(verdict.status)
    found = [
        Shown.of(SUBJECTS[name], case, ladder_of(case), statuses[case.name])
        for case in selected(selection)
    ]
    assert any(each.is_parted for each in found) or name == "float64"
    check_rungs(found)


def ladder_of(case):
    return GradientLadder.of(*case.operands, **case.options)


@pytest.mark.parametrize("name", ["float64_sums", "serial", "atomics"])
def test_right_subject_is_on_its_rung_through_verify(name):
    only = "sums-of-4096-*", "diagnostic-*", "large-sums-*"
    check_through_verify(name, Selection(dtypes=("float32",), layouts=("NCX",), only=only))


@pytest.mark.long
@pytest.mark.parametrize("name", SUBJECTS)
def test_right_subject_is_on_its_rung_in_the_smoke_battery(name):
    check_through_verify(name, Selection(dtypes=tuple(DTYPES)))


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_subject_is_on_its_rung_in_the_full_battery(dtype, layout):
    found = {name: [] for name in SUBJECTS}
    for case in selected(Selection("full", (dtype,), (layout,))):
        ladder = ladder_of(case)
        for name, subject in SUBJECTS.items():
            statuses = statuses_of(subject, case, ladder)
            found[name].append(Shown.of(subject, case, ladder, statuses))
    for each in found.values():
        check_rungs(each)


def statuses_of(subject, case, ladder):
    with np.errstate(all="ignore"):
        outputs = subject(*case.operands, **case.options)
    return [ladder.grade(name, a).status for name, a in zip(GRADIENTS, outputs, strict=True)]


def test_grade_of_deviations_rounded_in_one_direction_is_float32():
    # x is a multiple of 2**-21, and so is what x - mean is rounded to: all are off by 2**-23.
    rng = np.random.default_rng(0)
    count = 4000
    c = rng.uniform(5.7, 6.9, (count, 1)) * rng.choice([-1, 1], (count, 1))
    x = (c + 1).astype(np.float32)
    x -= np.remainder(x, np.float32(2.0**-21))
    dy = rng.uniform(0.9, 1.1, (count, 1)).astype(np.float32)
    mean, variance = np.float32([1 + 2.0**-23]), np.float32([1])
    operands = x, dy, mean, variance, None
    ladder = GradientLadder.of(*operands, **OPTIONS)
    dgamma = SUBJECTS["float64_sums"](*operands, **OPTIONS)[1]
    assert ladder.grade("dgamma", dgamma).status == "float32"
    # More than independent errors lose.
    error = abs(float(dgamma[0]) - ladder.value("dgamma").hi[0])
    assert error > 10 * 2.0**-24 * ladder.scales.dgamma.root[0]


def test_grade_of_serial_sum_of_16_bit_products_near_halves_is_serial():
    # The mean is near a value of 8 bits, so most products are just below a half of the sum's last
    # place where they are not multiples of it.
    rng = np.random.default_rng(0)
    count = 50_000
    x = rng.standard_normal((count, 1)) * 0.9 + 0.9140625
    dy = rng.standard_normal((count, 1)) + 0.5 * x + 0.4
    tensors = [each.astype(BFLOAT16) for each in (x, dy)]
    mean, variance = np.float32([0.9140681]), np.float32([0.81])
    operands = *tensors, mean, variance, None
    ladder = GradientLadder.of(*operands, **OPTIONS)
    dgamma = SUBJECTS["serial"](*operands, **OPTIONS)[1]
    grade = ladder.grade("dgamma", dgamma)
    assert grade.status == "serial"
    # More than additions of independent errors lose.
    random = 2 * np.sqrt(count / 2) * 2.0**-24
    error = abs(float(dgamma[0]) - ladder.value("dgamma").hi[0])
    assert error > random * ladder.terms("dgamma")[0]


def test_verify_of_unrepeatable_bits_fails_without_any_order():
    options = ["--dtypes", "float32", "--only", "diagnostic-float32-float32-NCX"]
    strict = CliRunner().invoke(app, ["verify", f"{FILE}:atomics", *options])
    assert strict.exit_code == 1
    assert "both are right" in " ".join(strict.output.split())
    accepted = CliRunner().invoke(app, ["verify", f"{FILE}:atomics", *options, "--any-order"])
    assert accepted.exit_code == 0, accepted.output


def test_verify_any_order_does_not_accept_a_wrong_second_call():
    selection = Selection(dtypes=("float32",), only=("diagnostic-float32-float32-NCX",))
    results = verify(Job(f"{WRONG_FILE}:right_first", selection, any_order=True))
    assert {each.id for each in findings(results)} == {"not_repeatable"}
