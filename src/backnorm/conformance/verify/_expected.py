"""Expected failures: files of patterns, and reports of an earlier run."""

from __future__ import annotations

import datetime
import fnmatch
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from backnorm.conformance.ladder import RUNGS, Rung, is_at_least
from backnorm.conformance.verify.run import STATUSES, Results, Status, Verdict
from backnorm.errors import ArgumentValueError


@dataclass(frozen=True, slots=True)
class Expectation:
    """A line in a file of expected failures: ``pattern  # reason  [until 2027-03-01]``.

    The pattern matches ``case/output``, or the name of a case.
    """

    pattern: str
    reason: str
    until: datetime.date | None = None

    @property
    def is_expired(self) -> bool:
        """Whether the line has a last day, `until`, and this day is over in UTC."""
        today = datetime.datetime.now(tz=datetime.UTC).date()
        return self.until is not None and today > self.until

    def matches(self, verdict: Verdict) -> bool:
        """Whether the pattern matches a verdict."""
        names = verdict.case, f"{verdict.case}/{verdict.output}"
        return any(fnmatch.fnmatchcase(name, self.pattern) for name in names)


def read_expectations(path: Path) -> list[Expectation]:
    """Return the expectations that a file contains, one on each line.

    Raises
    ------
    ArgumentValueError
        For a line without a reason, for a date that is invalid or not in brackets, and for bytes
        that are not UTF-8.
    """
    found = []
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        problem = f"must be UTF-8 (byte {error.start})"
        raise ArgumentValueError("--xfail", problem, came=str(path)) from error
    for number, line in enumerate(text.splitlines(), 1):
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
    """Whether an output was judged, and its status is worse than the rung `at_least`."""
    return verdict.is_judged and not is_at_least(verdict.status, at_least)


def with_expected(
    results: Results, expectations: list[Expectation], at_least: Rung
) -> tuple[Results, list[str], list[str]]:
    """Return the results with expected failures marked, and two lists of unmet expectations.

    `expectations` must not be expired. The verdict on an expected failure gets the status
    "expected_to_fail" and, as its text, the reason that the expectation gives. The first list has
    the outputs that passed unexpectedly, the second the patterns that match no output.
    """
    verdicts, passed, unmatched = [], [], [each.pattern for each in expectations]
    for verdict in results.verdicts:
        matching = [each for each in expectations if each.matches(verdict)]
        unmatched = [each for each in unmatched if each not in {m.pattern for m in matching}]
        if matching and fails(verdict, at_least):
            reason = matching[0].reason
            verdicts.append(replace(verdict, status="expected_to_fail", text=reason, grade=None))
        else:
            if matching and verdict.is_judged:
                passed.append(f"{verdict.case}/{verdict.output}")
            verdicts.append(verdict)
    return replace(results, verdicts=verdicts), passed, unmatched


@dataclass(frozen=True, slots=True)
class Baseline:
    """An earlier report.

    Attributes
    ----------
    seed : int
    statuses : mapping
        The status of each output, by case and output.
    mistakes : mapping
        The mistake of an output (`findings.mistake_of`), by case and output.
    """

    seed: int
    statuses: Mapping[tuple[str, str], Status]
    mistakes: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def number(self, results: Results) -> int:
        """Return how many of a run's outputs the report has."""
        if results.job.selection.seed != self.seed:
            return 0
        return sum((each.case, each.output) in self.statuses for each in results.verdicts)

    def change(self, verdict: Verdict, mistake: str | None) -> str:
        """Return a line with a verdict's output, its status in the report, and its new status."""
        key = verdict.case, verdict.output
        before = str(self.statuses.get(key, "not in it"))
        now = str(verdict.status)
        if before == now:
            before, now = f"{before} ({self.mistakes[key]})", f"{now} ({mistake})"
        return f"{verdict.case}/{verdict.output}: {before} -> {now}"

    def is_worse(
        self, verdict: Verdict, mistake: str | None, sufficient: Rung | None = None
    ) -> bool:
        """Whether an output is worse than in the report, has another mistake, or is new and fails.

        `mistake` is the text that `findings.mistake_of` returns for the verdict. The rungs exact
        and float64 count as equal, because an output of float64 arithmetic can be exact by
        accident. An output that reaches the rung `sufficient` does not count as worse.
        """
        key = verdict.case, verdict.output
        before = self.statuses.get(key)
        if before is None:
            return verdict.is_judged and verdict.status not in RUNGS
        # A right output may get the status "proves_nothing" when the other outputs of its case
        # become right, too. So this status does not count as worse.
        if verdict.status in ("proves_nothing", "expected_to_fail"):
            return False
        if sufficient is not None and is_at_least(verdict.status, sufficient):
            return False
        if before == verdict.status:
            return mistake is not None and mistake != self.mistakes.get(key, mistake)
        return _rank(verdict.status) > _rank(before)


def _rank(status: Status) -> int:
    return max(STATUSES.index(status), STATUSES.index("float64"))


def read_baseline(path: Path) -> Baseline:
    """Read a baseline, the report of an earlier run, from a file.

    Raises
    ------
    ArgumentValueError
        If the file is not a report of --json.
    """
    try:
        report = json.loads(path.read_text())
        statuses = {(each["case"], each["output"]): each["status"] for each in report["verdicts"]}
        if not set(statuses.values()) <= set(STATUSES):
            raise ValueError
        mistakes = {
            (each["case"], each["output"]): each["mistake"]
            for each in report["verdicts"]
            if "mistake" in each
        }
        return Baseline(report["seed"], statuses, mistakes)
    except (ValueError, LookupError, TypeError) as error:
        message = "must be a report of --json"
        raise ArgumentValueError("--baseline", message, came=str(path)) from error
