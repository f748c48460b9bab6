"""The battery that the real operator passes rejects every kernel that is broken on purpose."""

from __future__ import annotations

import pytest

from backnorm.conformance.battery import cases, examine
from backnorm.conformance.mutants import MUTANTS, Kernel

BATTERY = list(cases())


def rejected(kernel, case):
    return any(not verdict.passed for verdict in examine(kernel, case).values())


def test_battery_accepts_correct_kernel():
    assert [case.name for case in BATTERY if rejected(Kernel(), case)] == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_battery_rejects_each_mutant(mutant):
    assert any(rejected(mutant(), case) for case in BATTERY), mutant.wrong


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_overrides_one_method(mutant):
    changed = [name for name, value in vars(mutant).items() if callable(value)]
    assert len(changed) == 1


def test_case_names_are_unique():
    names = [case.name for case in BATTERY]
    assert len(set(names)) == len(names)
