"""The battery of float32 arithmetic accepts rounding errors of float32 and no larger ones."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.conformance.battery import cases, examine
from backnorm.conformance.mutants import MUTANTS, Kernel

from .single import SINGLE_MUTANTS, WITHIN_FLOAT32, Single

BATTERY = list(cases(arithmetic="float32"))
FLOAT32 = np.dtype(np.float32)


def rejected(kernel, battery=BATTERY, dtype=None):
    return [
        case.name
        for case in battery
        if dtype in (None, case.data.x.dtype)
        and any(not verdict.passed for verdict in examine(kernel, case).values())
    ]


@pytest.mark.parametrize("kernel", [Kernel(), Single()], ids=["float64", "float32"])
def test_float32_battery_accepts_correct_kernels(kernel):
    assert rejected(kernel) == []


def test_float64_battery_rejects_kernel_in_float32_arithmetic():
    names = rejected(Single(), list(cases(arithmetic="float64")), FLOAT32)
    assert any(name.startswith("realistic-float32") for name in names)


@pytest.mark.parametrize("mutant", SINGLE_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_float32_battery_rejects_kernels_less_accurate_than_float32(mutant):
    assert rejected(mutant(), dtype=FLOAT32), mutant.wrong


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_float32_battery_rejects_mutants_in_float32_arithmetic(mutant):
    if issubclass(mutant, (Single, *WITHIN_FLOAT32)):
        pytest.skip("no more than float32 may lose")

    class Both(mutant, Single):
        """The wrong step, all others in float32."""

    assert rejected(Both(), dtype=FLOAT32), mutant.wrong


def test_float32_battery_excludes_float64_elements():
    assert {case.data.x.dtype.name for case in BATTERY} == {"float32", "float16", "bfloat16"}
    assert {case.arithmetic for case in BATTERY} == {"float32"}
    assert {case.arithmetic for case in cases()} == {None}
    assert [case.name for case in cases(arithmetic="float64")] == [case.name for case in cases()]
