"""Known failures: the lines of a file that `backnorm verify --write-xfail` writes."""

from __future__ import annotations

import datetime
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from backnorm.conformance.verify.findings import Finding
from backnorm.conformance.verify.verdicts import Verdict
from backnorm.errors import ArgumentValueError

__all__ = ["KnownFailure", "known_failures", "read_xfail"]

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
