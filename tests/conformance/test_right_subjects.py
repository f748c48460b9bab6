"""Right subjects are never below their own rung, and some of their outputs are on it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import GradientLadder, is_at_least
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS, Selection, selected
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from tests.support.dtypes import BFLOAT16

from .in_process import verified
from .right_subjects import SUBJECTS

FILE = Path(__file__).with_name("right_subjects.py")
WRONG_FILE = Path(__file__).with_name("wrong_subjects.py")
OPTIONS = {"epsilon": 1e-5, "data_format": "NXC", "training": True}


def check_through_verify(name, selection):
    """Fail unless all outputs have the subject's rung or a better one, and some have its own."""
    subject = SUBJECTS[name]
    results = verified(Job(f"{FILE}:{name}", selection, any_order=name == "atomics"))
    assert findings(results) == []
    for dtype in selection.dtypes:
        # Not all of them take a batch without elements.
        statuses = {
            v.status
            for v in results.verdicts
            if f"-{dtype}-" in v.case and (v.status, v.case[:8]) != ("refused", "grid-0x5")
        }
        own = subject.rung(DTYPES[dtype])
        assert all(is_at_least(status, own) for status in statuses)
        # Sums of 16-bit elements may be exact; float64 is, too, where nothing cancels.
        assert own in statuses or dtype != "float32" or own == "float64"


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
    for case in selected(Selection("full", (dtype,), (layout,))):
        ladder = GradientLadder.of(*case.operands, **case.options)
        for subject in SUBJECTS.values():
            with np.errstate(all="ignore"):
                outputs = subject(*case.operands, **case.options)
            for name, actual in zip(GRADIENTS, outputs, strict=True):
                assert ladder.grade(name, actual).at_least(subject.rung(ladder.data)), case.name


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
    results = verified(Job(f"{WRONG_FILE}:right_first", selection, any_order=True))
    assert {each.id for each in findings(results)} == {"not_repeatable"}
