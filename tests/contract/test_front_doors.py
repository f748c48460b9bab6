"""A warm call, then a hostile operand or option, of each front door without a framework.

A sample of the cases, drawn by a seed; `test_operands` and `test_absent_operands` have all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[1]
_SCRIPTS = {
    "operators": _TESTS / "operator/operands.py",
    "dialects": _TESTS / "dialects/absent_operands.py",
}


@pytest.mark.parametrize("front_door", _SCRIPTS)
def test_sample_of_hostile_calls_gives_documented_error_or_right_result(run_cases, front_door):
    cases = run_cases(_SCRIPTS[front_door], "sample")
    cases.check_survival()
    cases.check_outcomes()
    assert len(cases.found) > 500
