"""The battery that the real operator passes rejects kernels that are broken on purpose."""

from __future__ import annotations

import pytest

from backnorm.conformance.battery import cases, examine
from backnorm.conformance.formula import BACKWARD, IMPRECISE, WRONG
from tests.conformance.wrong_kernels import WRONG_KERNELS, Kernel

BATTERY = list(cases())


def rejected(kernel, case):
    return any(not grade.passed for grade in examine(kernel, case).values())


@pytest.mark.parametrize("kernel", [BACKWARD, Kernel()], ids=["formula", "hand-written"])
def test_battery_accepts_correct_kernel(kernel):
    assert [case.name for case in BATTERY if rejected(kernel, case)] == []


# The ladder, whose bounds are larger, rejects the other mistakes: `tests/conformance/test_ladder`.
@pytest.mark.parametrize("mistake", IMPRECISE, ids=lambda mistake: mistake.name)
def test_battery_rejects_each_imprecise_formula(mistake):
    assert any(rejected(BACKWARD.wrong(mistake), case) for case in BATTERY), mistake.says


@pytest.mark.parametrize("kernel", WRONG_KERNELS, ids=lambda kernel: kernel.__name__)
def test_battery_rejects_each_hand_written_wrong_kernel(kernel):
    assert any(rejected(kernel(), case) for case in BATTERY)


def test_mistake_names_are_unique():
    names = [mistake.name for mistake in WRONG]
    assert len(set(names)) == len(names)


def test_case_names_are_unique():
    names = [case.name for case in BATTERY]
    assert len(set(names)) == len(names)
