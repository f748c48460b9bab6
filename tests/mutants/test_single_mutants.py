"""Judged as float32 arithmetic, what float32 may lose passes, and nothing else does."""

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
def test_the_unbroken_kernels_pass(kernel):
    assert rejected(kernel) == []


def test_float32_arithmetic_is_not_enough_where_float64_is_promised():
    names = rejected(Single(), list(cases(arithmetic="float64")), FLOAT32)
    assert any(name.startswith("realistic-float32") for name in names)


@pytest.mark.parametrize("mutant", SINGLE_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_kernel_that_loses_more_is_rejected(mutant):
    assert rejected(mutant(), dtype=FLOAT32), mutant.wrong


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_formula_is_rejected(mutant):
    if issubclass(mutant, (Single, *WITHIN_FLOAT32)):
        pytest.skip("no more than float32 may lose")

    class Both(mutant, Single):
        """The wrong step, all others in float32."""

    assert rejected(Both(), dtype=FLOAT32), mutant.wrong


def test_no_case_is_left_of_elements_without_the_choice():
    assert {case.data.x.dtype.name for case in BATTERY} == {"float32", "float16", "bfloat16"}
    assert {case.arithmetic for case in BATTERY} == {"float32"}
    assert {case.arithmetic for case in cases()} == {None}
    assert [case.name for case in cases(arithmetic="float64")] == [case.name for case in cases()]
