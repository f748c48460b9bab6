"""A warm call, then one with an operand or option absent, of another kind or in another's place.

For every operand and option of every function on NumPy's arrays, and for `out`: the error that
names it or the right result, never a crash, in one process of its own.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import backnorm
from backnorm.signature import SIGNATURES

from .operands import operation_of

pytestmark = pytest.mark.sweep

_SCRIPT = Path(__file__).with_name("operands.py")


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases(_SCRIPT)


def test_calls_with_altered_operands_do_not_crash_process(cases):
    cases.check_survival()


def test_operand_cases_include_all_public_operands(cases):
    found = cases.found
    for operation, signature in SIGNATURES.items():
        name = operation if hasattr(backnorm, operation) else f"batch_norm_{operation}"
        for operand in signature.operands if hasattr(backnorm, name) else ():
            # Running statistics are PyTorch's.
            if operand.name.startswith("running"):
                continue
            among = [case for case in found
                     if case.startswith(f"{name}(") and f": {operand.name} " in case]  # fmt: skip
            assert len(among) > 150, (operation, operand.name)


@pytest.mark.parametrize("name", [name for name in backnorm.__all__ if operation_of(name)])
def test_operand_cases_include_all_options_of_function(cases, name):
    signature = SIGNATURES[operation_of(name)]
    options = set(inspect.signature(getattr(backnorm, name)).parameters) - set(signature.names)
    # What is only planned is not written.
    options -= {"out"} if name == "explain" else set()
    for option in options:
        among = [case for case in cases.found
                 if case.startswith(f"{name}(") and f": {option} " in case]  # fmt: skip
        assert len(among) > 80, option


@pytest.mark.parametrize(
    "name", ["apply", "batch_norm_backward", "batch_norm_forward", "batch_norm_inference"]
)
def test_operand_cases_include_out(cases, name):
    found = cases.found
    assert sum(case.startswith(f"{name}(") and ": out " in case for case in found) > 100


def test_calls_with_altered_operands_raise_error_or_equal_first_call(cases):
    cases.check_outcomes()


@pytest.mark.sweep
@pytest.mark.timeout(1000)
def test_calls_with_all_option_combinations_raise_error_or_equal_first_call(run_cases):
    cases = run_cases(_SCRIPT, "all")
    cases.check_survival()
    cases.check_outcomes()
    assert len(cases.found) > 100_000
