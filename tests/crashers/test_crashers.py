"""No input crashes the interpreter, and each gives the documented error or value.

All cases run in one process of their own, so that a crash is a failure here and names its case.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.calls import SUBJECTS

from .cases import all_cases


@pytest.fixture(scope="module")
def cases(run_cases):
    return run_cases(Path(__file__).with_name("cases.py"))


def test_crasher_process_runs_all_cases_and_exits_with_0(cases):
    cases.check_survival()
    assert [*cases.found] == [case.name for case in all_cases()]


def test_crasher_cases_cover_each_subject(cases):
    for subject in SUBJECTS:
        assert sum(name.startswith(f"{subject}: ") for name in cases.found) > 40


def test_crasher_cases_give_documented_error_or_value(cases):
    cases.check_outcomes()
