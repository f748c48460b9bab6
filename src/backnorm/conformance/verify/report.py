"""The report of a run: the findings, the counts, and the failures that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from backnorm.conformance.ladder import Rung, is_at_least
from backnorm.conformance.verify.findings import Finding, findings, mistake_of
from backnorm.conformance.verify.run import Results
from backnorm.conformance.verify.verdicts import Verdict
from backnorm.conformance.verify.xfail import KnownFailure

__all__ = ["Report"]


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
