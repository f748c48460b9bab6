"""The report of a run: the findings, the counts, and the failures that are known.

Known failures are the lines of a file that `backnorm verify --write-xfail` writes.
"""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from backnorm.conformance.ladder import Rung, is_at_least
from backnorm.conformance.verify.findings import Finding, findings, mistake_of
from backnorm.conformance.verify.run import Results
from backnorm.conformance.verify.verdicts import Verdict
from backnorm.errors import ArgumentValueError

__all__ = ["KnownFailure", "Report", "known_failures", "read_xfail"]

_LINE = re.compile(
    r"(?P<case>\S+)\s+(?P<output>\S+)\s+(?P<mistake>[^#]*[^#\s])"
    r"\s*(#(?P<reason>((?!\buntil\b[\s:]*\d).)*?)(\[until\s+(?P<until>[-\d]+)\]\s*)?)?",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A failure that is expected: ``CASE OUTPUT MISTAKE  # REASON [until 2027-03-01]``.

    Attributes
    ----------
    case, output : str
        Globs.
    mistake : str
        The text of a :attr:`Finding.mistake`, or a glob.
    reason : str
    until : date or None
        The last day of the line, in UTC.
    """

    case: str
    output: str
    mistake: str
    reason: str = ""
    until: datetime.date | None = None

    def __str__(self) -> str:
        until = f" (until {self.until})" if self.until else ""
        return f"{self.case} {self.output} {self.mistake}{until}"

    @property
    def is_expired(self) -> bool:
        """Whether the last day of the line is over."""
        today = datetime.datetime.now(tz=datetime.UTC).date()
        return self.until is not None and today > self.until

    def matches(self, verdict: Verdict, mistake: str) -> bool:
        """Whether the line expects a failure with this mistake."""
        return (
            fnmatch.fnmatchcase(verdict.case, self.case)
            and fnmatch.fnmatchcase(verdict.output, self.output)
            and (mistake == self.mistake or fnmatch.fnmatchcase(mistake, self.mistake))
        )


def known_failures(finding: Finding, results: Collection[str]) -> Iterator[KnownFailure]:
    """Yield lines that expect a finding. `results` are the results of the operation.

    A diagnosis makes one line for each output. Other findings say less of the mistake, so they make
    a line for each kind of case.
    """
    kinds: dict[str, list[str]] = {}
    for case in sorted(finding.cases):
        kind = "" if finding.is_diagnosis else case.rsplit("-", 3)[0]
        kinds.setdefault(kind, []).append(case)
    outputs = ("*",) if set(finding.outputs) == set(results) else finding.outputs
    for cases in kinds.values():
        for output in outputs:
            yield KnownFailure(_glob(cases), output, finding.mistake)


def _glob(cases: Iterable[str]) -> str:
    """Return a pattern with the purpose, the types and the layout that all cases have."""
    purposes, dtypes, statistics, layouts = zip(
        *(case.rsplit("-", 3) for case in cases), strict=True
    )
    # If element types differ, the type of the statistics says nothing.
    types = zip(dtypes, statistics, strict=True)
    parts = purposes, ["-".join(each) for each in types], layouts
    words = ["*" if len(set(part)) > 1 else part[0] for part in parts]
    return re.sub(r"\*(-\*)+", "*", "-".join(words))


def read_xfail(path: Path) -> list[KnownFailure]:
    """Return the known failures that a file has.

    Raises
    ------
    ArgumentValueError
        For a line that is not of the form of :class:`KnownFailure`, for a date that is invalid or
        not in brackets, and for bytes that are not UTF-8.
    """
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        problem = f"must be UTF-8 (byte {error.start})"
        raise ArgumentValueError("--xfail", problem, came=str(path)) from error
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    return [_failure(number, line) for number, line in lines if line and not line.startswith("#")]


def _failure(number: int, line: str) -> KnownFailure:
    try:
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError
        case, output, mistake, reason, until = match.group(
            "case", "output", "mistake", "reason", "until"
        )
        date = None if until is None else datetime.date.fromisoformat(until)
        return KnownFailure(case, output, mistake, (reason or "").strip(), date)
    except ValueError as error:
        raise ArgumentValueError(
            "--xfail", f"line {number} is no known failure", came=line,
            accepted="CASE OUTPUT MISTAKE, then # REASON [until YYYY-MM-DD] if you like",
        ) from error  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """The judgement of a run.

    Attributes
    ----------
    results : Results
        The status of a failure that is known is "expected_to_fail".
    at_least : Rung
        The worst rung that does not fail.
    findings : list of Finding
        The findings without known failures.
    every : list of Finding
        The findings with known failures.
    unmet, expired : list of KnownFailure
        The known failures that no output shows, and those whose last day is over.
    """

    results: Results
    at_least: Rung
    findings: Sequence[Finding]
    every: Sequence[Finding]
    unmet: Sequence[KnownFailure] = ()
    expired: Sequence[KnownFailure] = ()

    @classmethod
    def of(
        cls, results: Results, xfail: Sequence[KnownFailure] = (), at_least: Rung = "serial"
    ) -> Report:
        """Return the report of a run; `xfail` are its known failures."""
        every = findings(results, at_least)
        if not xfail:
            return cls(results, at_least, every, every)
        known = [each for each in xfail if not each.is_expired]
        met, verdicts = set[KnownFailure](), []
        for verdict in results.verdicts:
            mistake = mistake_of(verdict, every) if fails(verdict, at_least) else None
            lines = [] if mistake is None else [k for k in known if k.matches(verdict, mistake)]
            if lines:
                text = lines[0].reason or lines[0].mistake
                verdict = replace(verdict, status="expected_to_fail", text=text, grade=None)
            met.update(lines)
            verdicts.append(verdict)
        results = replace(results, verdicts=verdicts)
        unmet = [each for each in known if each not in met]
        expired = [each for each in xfail if each.is_expired]
        return cls(results, at_least, findings(results, at_least), every, unmet, expired)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of verdicts (one for each output of a case) with each status.

        The key "judged" has the number of all judged outputs, and "passed" that of the outputs
        which are at least as accurate as the rung `at_least`.
        """
        verdicts = self.results.verdicts
        judged = sum(verdict.is_judged for verdict in verdicts)
        passed = sum(is_at_least(verdict.status, self.at_least) for verdict in verdicts)
        return {"judged": judged, "passed": passed, **Counter(v.status for v in verdicts)}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was judged."""
        return not (self.counts["judged"] or "expected_to_fail" in self.counts)

    @property
    def failed(self) -> bool:
        """Whether the run fails: there is a finding, or nothing was judged."""
        return bool(self.findings) or self.is_empty

    def fails(self, verdict: Verdict) -> bool:
        """Whether an output was judged, and its status is worse than the rung `at_least`."""
        return fails(verdict, self.at_least)


def fails(verdict: Verdict, at_least: Rung) -> bool:
    """Whether an output was judged, and its status is worse than a rung."""
    return verdict.is_judged and not is_at_least(verdict.status, at_least)
