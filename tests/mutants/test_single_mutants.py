"""The battery of float32 arithmetic accepts rounding errors of float32 and no larger ones."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.conformance.battery import cases, examine
from backnorm.conformance.formula import BACKWARD, IMPRECISE, WRONG
from tests.conformance.wrong_kernels import WRONG_KERNELS

from .single import SINGLE, SINGLE_MISTAKES, WITHIN_FLOAT32

BATTERY = list(cases(arithmetic="float32"))
FLOAT32 = np.dtype(np.float32)


def rejected(kernel, battery=BATTERY, dtype=None):
    """Yield the names of the cases that a kernel fails."""
    for case in battery:
        is_judged = dtype in (None, case.data.x.dtype)
        if is_judged and any(not grade.passed for grade in examine(kernel, case).values()):
            yield case.name


@pytest.mark.parametrize("kernel", [BACKWARD, SINGLE], ids=["float64", "float32"])
def test_float32_battery_accepts_correct_kernels(kernel):
    assert list(rejected(kernel)) == []


def test_float64_battery_rejects_kernel_in_float32_arithmetic():
    names = rejected(SINGLE, list(cases(arithmetic="float64")), FLOAT32)
    assert any(name.startswith("realistic-float32") for name in names)


@pytest.mark.parametrize("mistake", SINGLE_MISTAKES, ids=lambda mistake: mistake.name)
def test_float32_battery_rejects_kernels_less_accurate_than_float32(mistake):
    assert any(rejected(SINGLE.wrong(mistake), dtype=FLOAT32)), mistake.says


# One mistake in each step: `test_mutants` has all.
MISTAKES = [
    mistake
    for mistake in WRONG
    if mistake.name in WRONG_KERNELS.values()
    or (mistake in IMPRECISE and mistake not in WITHIN_FLOAT32)
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_float32_battery_rejects_mistakes_in_float32_arithmetic(mistake):
    """The other steps are computed in float32."""
    assert any(rejected(SINGLE.wrong(mistake), dtype=FLOAT32)), mistake.says


def test_float32_battery_excludes_float64_elements():
    assert {case.data.x.dtype.name for case in BATTERY} == {"float32", "float16", "bfloat16"}
    assert {case.arithmetic for case in BATTERY} == {"float32"}
    assert {case.arithmetic for case in cases()} == {None}
    assert [case.name for case in cases(arithmetic="float64")] == [case.name for case in cases()]
