"""Summarise verdicts as findings: sentences that describe mistakes."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from backnorm.conformance._naming import AS_ROUNDED, FEW_BITS
from backnorm.conformance.battery import Recipe
from backnorm.conformance.ladder import RUNGS, Grade, Rung
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.run import Job, Results
from backnorm.conformance.verify.verdicts import Status, Verdict
from backnorm.errors import counted

__all__ = ["Finding", "findings", "mistake_of", "sentence"]

_FAULTS = {
    "changed_input": "the subject writes to an input",
    "not_repeatable": "the same inputs give other bits of {outputs} in another call",
    "stale": "{outputs}: a call with other values in the same memory returns earlier results",
    "wrote_outside": "the subject writes outside of an array",
    "error": "the call fails",
    "hang": "the subject does not return",
    "crash": "the subject ends its process",
    "out_of_memory": "the subject takes more memory than allowed",
}

# If a verdict has one of these faults, its text describes what happened in the call, so a finding
# quotes this text.
_EVENTS = "wrote_outside", "error", "hang", "crash", "out_of_memory"
# The largest number of cases that a finding names.
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """A mistake of a subject.

    Attributes
    ----------
    id : str
        The identifier in machine-readable reports.
    says : str
        The mistake as a sentence without a full stop.
    outputs : tuple of str
        The outputs that are wrong.
    cases : frozenset of str
        The cases with this mistake.
    of : int
        The number of cases that were judged.
    first : str
        The first case with this mistake.
    evidence : mapping
        Numbers that support the finding.
    reproduce : str
        The command that reproduces it.
    is_diagnosis : bool
        Whether the finding is a diagnosis of the outputs of a diagnostic case.
    """

    id: str
    says: str
    outputs: tuple[str, ...]
    cases: frozenset[str]
    of: int
    first: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    reproduce: str = ""
    is_diagnosis: bool = False

    @property
    def mistake(self) -> str:
        """The text by which the mistake is recognised in another run: a diagnosis, or the id. It
        has no errors in ulps, because these differ from run to run.
        """
        return self.says if self.is_diagnosis else self.id

    def explains(self, verdict: Verdict) -> bool:
        """Whether the output of a verdict has this mistake."""
        return verdict.case in self.cases and verdict.output in self.outputs


def findings(results: Results, at_least: Rung = "serial") -> list[Finding]:
    """Return the findings of a run.

    First come the diagnoses: mistakes that were named from the outputs of diagnostic cases. The
    other findings follow, those with the most cases first.

    Parameters
    ----------
    results : Results
    at_least : Rung
        The worst acceptable rung.
    """
    of_formula = list(_of_formula(results))
    others = [
        *_of_numbers(results, of_formula),
        *_unusable(results),
        *_faults(results),
        *_below(results, at_least),
    ]
    found = of_formula + sorted(others, key=lambda finding: -len(finding.cases))
    if results.job.files:
        return found
    return [_with_command(finding, results, at_least) for finding in found]


def sentence(verdict: Verdict, found: Iterable[Finding]) -> str:
    """Return the text of a verdict. If the verdict has no text, return what the first finding that
    explains the verdict says. If no finding explains it, return the verdict's status.
    """
    says = (each.says for each in found if each.explains(verdict))
    return verdict.text or next(says, verdict.status)


def mistake_of(verdict: Verdict, found: Iterable[Finding]) -> str | None:
    """Return the mistake of the first finding that explains a verdict; None: there is none."""
    return next((each.mistake for each in found if each.explains(verdict)), None)


def _of_formula(results: Results) -> Iterator[Finding]:
    """Yield each mistake that the diagnostic cases show.

    A finding also has the names of the other cases whose errors the mistake explains.
    """
    inexact = [verdict for verdict, _ in _inexact(results)]
    if not inexact:
        return
    names = {verdict.case for verdict in inexact}
    groups = {name: _group(recipe) for name, recipe in results.recipes.items()}
    # The names of cases with at most one element per channel, so that a sum has one term.
    single = {name for name, recipe in results.recipes.items() if recipe.count <= 1}
    # Maps the text of a diagnosis to all cases that have this diagnosis.
    diagnosed: dict[str, list[str]] = {}
    for case, diagnosis in results.diagnoses.items():
        if case in names:
            diagnosed.setdefault(diagnosis.says, []).append(case)
    of_diagnosed = {case for each in diagnosed.values() for case in each}
    for says, each in diagnosed.items():
        diagnosis = results.diagnoses[each[0]]
        shown = {groups[case] for case in each}
        explained = [verdict for verdict in inexact if groups[verdict.case] in shown]
        outputs = {verdict.output for verdict in explained if verdict.case in of_diagnosed}
        if diagnosis.kind == "precision" and any(
            v.case in single and v.output in outputs and _exceeds_few_bits(v) for v in explained
        ):
            says = f"{says.removesuffix(AS_ROUNDED)}, but wrong for one element per channel: "
            says += "an element may be added twice, or be missing"
        yield Finding(
            "-".join(diagnosis.names) or diagnosis.kind,
            says,
            tuple(output for output in results.operation.results if output in outputs),
            frozenset(verdict.case for verdict in explained if verdict.output in outputs),
            _judged(results),
            each[0],
            diagnosis.evidence,
            is_diagnosis=True,
        )


def _exceeds_few_bits(verdict: Verdict) -> bool:
    """Whether the error is larger than any that computing in a type of few bits can cause."""
    grade = verdict.grade
    assert grade is not None
    return abs(grade.got - grade.exact) > FEW_BITS * grade.condition * abs(grade.exact)


def _group(recipe: Recipe) -> tuple[str, str, bool]:
    """Return a case's element type, its layout, and whether it is a case of training. If two cases
    agree in all three, the diagnosis of one case also explains errors of the other.
    """
    return str(recipe.variant.dtype), recipe.variant.data_format, recipe.training


def _of_numbers(results: Results, explained: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings for wrong outputs that no other finding explains.

    Wrong outputs make one finding if they have the same name (such as dx) and the same status, and
    if their cases have the same kind of data.
    """
    wrong = [
        (v, g) for v, g in _inexact(results) if not any(each.explains(v) for each in explained)
    ]
    judged = _judged(results)

    def family(pair: tuple[Verdict, Grade]) -> tuple[str, str, str]:
        verdict, _ = pair
        subject = verdict.case.rpartition(f"-{verdict.dtype}-")[0]
        return verdict.output, subject, verdict.status

    def share(pair: tuple[Verdict, Grade]) -> float:
        return list(pair[1].share.values())[-1]

    for (output, about, status), each in itertools.groupby(sorted(wrong, key=family), family):
        pairs = list(each)
        verdict, grade = worst = max(pairs, key=share)
        evidence: dict[str, Any] = {}
        if status == "nonfinite":
            says = f"{output} is {grade.got:g} in {about}, where the exact value is "
            says += f"{grade.exact:.6g}"
        else:
            says = f"{output} is {grade.ulp:.2g} ulp off in {about}, "
            says += f"{share(worst):.2g} times what serial sums may lose"
            evidence = {
                "ulp": grade.ulp,
                "share_of_serial": share(worst),
                "condition": grade.condition,
                "where": grade.where,
            }
        where = sorted({f"{v.dtype} {v.layout}" for v, _ in pairs})
        yield Finding(
            f"{output}-{status}", f"{says} ({', '.join(where)})", (output,),
            frozenset(v.case for v, _ in pairs), judged, verdict.case, evidence,
        )  # fmt: skip


def _inexact(results: Results) -> list[tuple[Verdict, Grade]]:
    """Return the verdicts on outputs that have the right type and shape, but wrong numbers."""
    return [
        (v, v.grade)
        for v in results.verdicts
        if v.status in ("wrong", "nonfinite") and v.grade is not None
    ]


def _unusable(results: Results) -> Iterator[Finding]:
    """Yield a finding for each output that is missing, or has a wrong type or shape."""
    ids: dict[Status, str] = {"not_written": "not_written", "wrong": "wrong-type-or-shape"}
    for output, status in itertools.product(results.operation.results, ids):
        verdicts = [
            v for v in results.verdicts
            if v.output == output and v.status == status and v.grade is None
        ]  # fmt: skip
        if not verdicts:
            continue
        number, names = len(verdicts), [v.case for v in verdicts]
        named = names[:_NAMED] + ["..."] * (number > _NAMED)
        what, _, details = verdicts[0].text.partition("; ")
        says = f"{what} in {counted(number, 'case')}: {', '.join(named)}; {details}"
        yield Finding(ids[status], says, (output,), frozenset(names), _judged(results), names[0])


def _faults(results: Results) -> Iterator[Finding]:
    for status, says in _FAULTS.items():
        verdicts = [v for v in results.verdicts if v.status == status]
        if verdicts:
            first = verdicts[0]
            outputs = tuple(
                o for o in results.operation.results if any(v.output == o for v in verdicts)
            )
            text = says.format(outputs=", ".join(outputs))
            text = f"{text}: {first.text}" if status in _EVENTS else text
            if status not in _EVENTS and len({v.text for v in verdicts}) == 1:
                text += first.text.removeprefix(status)
            cases = frozenset(v.case for v in verdicts)
            yield Finding(status, text, outputs, cases, _judged(results), first.case)


def _below(results: Results, at_least: Rung) -> Iterator[Finding]:
    worse = RUNGS[RUNGS.index(at_least) + 1 :]
    for output in results.operation.results:
        verdicts = [v for v in results.verdicts if v.output == output and v.status in worse]
        if verdicts:
            worst = max(verdicts, key=lambda v: RUNGS.index(v.status))
            yield Finding(
                f"{output}-{worst.status}",
                f"{output} is as accurate as {worst.status}, not {at_least}",
                (output,),
                frozenset(v.case for v in verdicts),
                _judged(results),
                worst.case,
            )


def _judged(results: Results) -> int:
    return len({v.case for v in results.verdicts if v.is_judged})


def _with_command(finding: Finding, results: Results, at_least: Rung) -> Finding:
    job = results.job
    parts = ["backnorm", "verify", *["--command"] * job.command, shlex.quote(job.subject)]
    if job.selection.operation != "backward":
        parts += ["--operation", job.selection.operation]
    if job.dialect is not None:
        parts += ["--dialect", job.dialect]
    if job.op is not None:
        parts += ["--op", job.op]
    for shape in job.selection.shapes:
        parts += ["--shape", ",".join(map(str, shape))]
    if job.selection.tier != "smoke":
        parts += ["--tier", job.selection.tier]
    if job.selection.huge and finding.first.startswith("beyond-int32-"):
        parts += ["--huge"]
    dtype = next(v.dtype for v in results.verdicts if v.case == finding.first)
    if dtype not in Selection().dtypes:
        parts += ["--dtypes", dtype]
    if job.selection.seed:
        parts += ["--seed", str(job.selection.seed)]
    if at_least != "serial":
        parts += ["--at-least", at_least]
    if job.timeout != Job(job.subject).timeout:
        parts += ["--timeout", f"{job.timeout:g}"]
    if job.memory:
        parts += ["--memory", str(job.memory)]
    parts += ["--any-order"] * job.any_order
    parts += ["--only", shlex.quote(finding.first), "--show"]
    return replace(finding, reproduce=" ".join(parts))
