"""No input crashes the interpreter, and each gives the documented error or value.

All cases run in one process of their own, so that a crash is a failure here and names its case.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import all_cases
from .subjects import SUBJECTS

CASES = {case.name: case for case in all_cases()}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    log = tmp_path_factory.mktemp("crashers") / "log"
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-m", "tests.crashers.driver"],
            cwd=ROOT, stdout=stream, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
        )  # fmt: skip
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    outcomes = {line["case"]: line for line in lines if "case" in line}
    begun = [line["begins"] for line in lines if "begins" in line]
    return done, outcomes, begun


def test_crasher_process_runs_all_cases_and_exits_with_0(run):
    done, outcomes, begun = run
    last = begun[-1] if begun else "no case"
    assert done.returncode == 0, f"ended with {done.returncode} in {last!r}:\n{done.stderr}"
    assert set(outcomes) == set(CASES)


def test_crasher_cases_have_unique_names_and_cover_each_subject():
    names = [case.name for case in all_cases()]
    assert len(names) == len(set(names))
    for subject in SUBJECTS:
        assert sum(name.startswith(f"{subject}:") for name in names) > 40


@pytest.mark.parametrize("subject", [*SUBJECTS, "canonical"])
def test_crasher_cases_of_subject_give_documented_error_or_value(run, subject):
    _, outcomes, _ = run
    wrong = [
        f"{name}: {text}"
        for name, case in CASES.items()
        if name.startswith(f"{subject}:")
        for text in [fault(case, outcomes.get(name))]
        if text
    ]
    assert not wrong, "\n".join(wrong)


def fault(case, outcome):
    """Return what is wrong with an outcome, or None."""
    if outcome is None:
        return "did not end"
    if case.error is None:
        return outcome["error"]
    if outcome["error"] is None:
        return f"expected {case.error.__name__}, none came"
    if case.error.__name__ not in outcome["kinds"]:
        return f"expected {case.error.__name__}, got {outcome['kinds'][0]}: {outcome['error']}"
    if not outcome["ours"]:
        return f"not a BacknormError: {outcome['kinds'][0]}: {outcome['error']}"
    if not outcome["error"].startswith(f"{case.argument}:"):
        return f"does not name {case.argument}: {outcome['error']}"
    return None
