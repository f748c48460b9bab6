"""A warm call, then one with an operand absent, of another kind or in another's place.

For every operand of every function on NumPy's arrays, and for `out`: the error that names it or the
right result, never a crash, in one process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import backnorm
from backnorm.signature import SIGNATURES


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases(Path(__file__).with_name("operands.py"))


def test_the_process_survives_every_call(cases):
    cases.check_survival()


def test_every_operand_of_every_operation_is_among_the_cases(cases):
    found = cases.found
    for operation, signature in SIGNATURES.items():
        name = operation if hasattr(backnorm, operation) else f"batch_norm_{operation}"
        for operand in signature.operands:
            # Running statistics are PyTorch's.
            if operand.name.startswith("running"):
                continue
            among = [case for case in found
                     if case.startswith(f"{name}(") and f": {operand.name} " in case]  # fmt: skip
            assert len(among) > 25, (operation, operand.name)


@pytest.mark.parametrize(
    "name", ["apply", "batch_norm_backward", "batch_norm_forward", "batch_norm_inference"]
)
def test_out_is_among_the_cases(cases, name):
    found = cases.found
    assert sum(case.startswith(f"{name}(") and ": out " in case for case in found) > 100


def test_each_gives_the_error_or_the_result_of_a_first_call(cases):
    cases.check_outcomes()
