"""Expected failures: files of patterns, and reports of an earlier run."""

from __future__ import annotations

import datetime
import fnmatch
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from backnorm.conformance.ladder import RUNGS, Rung, is_at_least
from backnorm.conformance.verify.run import Results, Verdict
from backnorm.errors import ArgumentValueError


@dataclass(frozen=True, slots=True)
class Expectation:
    """A line in a file of expected failures: ``pattern  # reason  [until 2027-03-01]``.

    The pattern matches ``case/output``, or the name of a case.
    """

    pattern: str
    reason: str
    until: datetime.date | None = None

    def matches(self, verdict: Verdict, today: datetime.date) -> bool:
        """Whether a verdict is expected."""
        if self.until is not None and today > self.until:
            return False
        names = verdict.case, f"{verdict.case}/{verdict.output}"
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in names)


def read_expectations(path: Path) -> list[Expectation]:
    """Return the expectations of a file.

    Raises
    ------
    ArgumentValueError
        For a line without a reason, and for a date that is invalid or not in brackets.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        pattern, _, reason = (part.strip() for part in line.partition("#"))
        if not pattern:
            continue
        reason, _, until = reason.partition("[until ")
        if not reason.strip():
            raise ArgumentValueError(
                "--xfail",
                f"line {number} must have a reason",
                came=line,
                accepted="pattern  # reason",
            )
        date = None
        if re.search(r"\buntil\s*:?\s*\d", reason, re.IGNORECASE):
            raise ArgumentValueError(
                "--xfail",
                f"line {number} must have its date in brackets",
                came=line,
                accepted="pattern  # reason  [until YYYY-MM-DD]",
            )
        if until:
            try:
                date = datetime.date.fromisoformat(until.rstrip("] "))
            except ValueError as error:
                raise ArgumentValueError(
                    "--xfail", f"line {number} must have a date", came=until, accepted="YYYY-MM-DD"
                ) from error
        found.append(Expectation(pattern, reason.strip(), date))
    return found


def fails(verdict: Verdict, at_least: Rung) -> bool:
    """Whether an output was judged, and is on no rung or on a worse one than `at_least`."""
    return verdict.is_judged and not is_at_least(verdict.status, at_least)


def with_expected(
    results: Results, expectations: list[Expectation], at_least: Rung
) -> tuple[Results, int]:
    """Return the results with expected failures marked, and how many outputs passed unexpectedly.

    An expected failure gets the status "expected_to_fail", and its reason as text.
    """
    today = datetime.datetime.now(tz=datetime.UTC).date()
    verdicts, passed = [], 0
    for verdict in results.verdicts:
        reasons = [each.reason for each in expectations if each.matches(verdict, today)]
        if reasons and fails(verdict, at_least):
            known = replace(verdict, status="expected_to_fail", text=reasons[0], grade=None)
            verdicts.append(known)
        else:
            passed += bool(reasons) and verdict.is_judged
            verdicts.append(verdict)
    return replace(results, verdicts=verdicts), passed


def read_baseline(path: Path) -> dict[tuple[str, str], str]:
    """Return the statuses of an earlier report by case and output.

    Raises
    ------
    ArgumentValueError
        If the file is not such a report.
    """
    try:
        report = json.loads(path.read_text())
        return {(each["case"], each["output"]): each["status"] for each in report["verdicts"]}
    except (ValueError, LookupError, TypeError) as error:
        message = "must be a report of --json"
        raise ArgumentValueError("--baseline", message, came=str(path)) from error


def is_new(verdict: Verdict, baseline: dict[tuple[str, str], str]) -> bool:
    """Whether a verdict is worse than that of the baseline."""
    before = baseline.get((verdict.case, verdict.output))
    if before == verdict.status:
        return False
    if verdict.status in RUNGS:
        return before in RUNGS and RUNGS.index(verdict.status) > RUNGS.index(before)
    return verdict.is_judged
