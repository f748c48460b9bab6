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
from backnorm.conformance.verify.draws import described, is_drawn
from backnorm.conformance.verify.run import Job, Results
from backnorm.conformance.verify.verdicts import Status, Verdict
from backnorm.errors import counted

__all__ = ["Finding", "findings", "mistake_of", "sentence"]

_FAULTS = {
    "changed_input": "the subject writes to an input",
    "not_repeatable": "the same inputs give other bits of {outputs} in another call",
    "overwritten": "a later call overwrites {outputs}, which an earlier call has returned",
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
    first : str
        The first case with this mistake.
    of : int
        The number of cases that were judged.
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
    first: str
    of: int = 0
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
    # Each drawn case that fails has its own finding.
    failing = [v for v in results.verdicts if is_drawn(v.case) and v.has_failed]
    of_selection = replace(results, verdicts=[v for v in results.verdicts if v not in failing])
    of_formula = list(_of_formula(of_selection))
    others = [
        *_of_numbers(of_selection, of_formula),
        *_unusable(of_selection),
        *_faults(of_selection),
        *_below(of_selection, at_least),
    ]
    found = of_formula + sorted(others, key=lambda finding: -len(finding.cases))
    found += _of_draws(replace(results, verdicts=failing))
    of = len({verdict.case for verdict in results.verdicts if verdict.is_judged})
    return [replace(each, of=of, reproduce=_command(each, results, at_least)) for each in found]


def sentence(verdict: Verdict, found: Iterable[Finding]) -> str:
    """Return the text of a verdict. If the verdict has no text, return what the first finding that
    explains the verdict says. If no finding explains it, return the verdict's status.
    """
    says = (each.says for each in found if each.explains(verdict))
    return verdict.text or next(says, verdict.status)


def mistake_of(verdict: Verdict, found: Iterable[Finding]) -> str | None:
    """Return the mistake of the first finding that explains a verdict; None: there is none."""
    return next((each.mistake for each in found if each.explains(verdict)), None)


def _finding(
    id_: str, says: str, verdicts: Sequence[Verdict], results: Results, **fields: Any
) -> Finding:
    """Return the finding that some verdicts show."""
    wrong = {verdict.output for verdict in verdicts}
    outputs = tuple(output for output in results.operation.results if output in wrong)
    cases = frozenset(verdict.case for verdict in verdicts)
    return Finding(id_, says, outputs, cases, **{"first": verdicts[0].case, **fields})


def _of_formula(results: Results) -> Iterator[Finding]:
    """Yield each mistake that the diagnostic cases show.

    A finding also has the names of the other cases whose errors the mistake explains.
    """
    inexact = [verdict for verdict in results.verdicts if verdict.is_inexact]
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
        explained = [verdict for verdict in explained if verdict.output in outputs]
        if diagnosis.kind == "precision" and any(
            verdict.case in single and _exceeds_few_bits(verdict) for verdict in explained
        ):
            says = f"{says.removesuffix(AS_ROUNDED)}, but wrong for one element per channel: "
            says += "an element may be added twice, or be missing"
        yield _finding(
            "-".join(diagnosis.names) or diagnosis.kind, says, explained, results,
            first=each[0], evidence=diagnosis.evidence, is_diagnosis=True,
        )  # fmt: skip


def _of_draws(results: Results) -> Iterator[Finding]:
    """Yield a finding for each drawn case; all verdicts of the results fail."""
    for case, each in itertools.groupby(results.verdicts, lambda verdict: verdict.case):
        verdicts = list(each)
        # The few numbers of a small case may agree with a fitted mistake by chance.
        known = {
            name: diagnosis
            for name, diagnosis in results.diagnoses.items()
            if name == case and not any(each.endswith("-other") for each in diagnosis.names)
        }
        alone = replace(results, verdicts=verdicts, diagnoses=known)
        named = (*_of_formula(alone), *_unusable(alone), *_faults(alone))
        outputs = ", ".join(verdict.output for verdict in verdicts)
        finding = _finding("drawn", f"{outputs} wrong", verdicts, results)
        if named:
            finding = replace(finding, id=named[0].id, says=named[0].says)
        where = described(results.recipes[case])
        yield replace(finding, says=f"{finding.says}, in the smallest drawn case: {where}")


def _exceeds_few_bits(verdict: Verdict) -> bool:
    """Whether the error is larger than any that computing in a type of few bits can cause."""
    grade = _grade(verdict)
    return abs(grade.got - grade.exact) > FEW_BITS * grade.condition * abs(grade.exact)


def _grade(verdict: Verdict) -> Grade:
    assert verdict.grade is not None
    return verdict.grade


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
        verdict for verdict in results.verdicts
        if verdict.is_inexact and not any(each.explains(verdict) for each in explained)
    ]  # fmt: skip

    def family(verdict: Verdict) -> tuple[str, str, str]:
        purpose = verdict.case.rpartition(f"-{verdict.dtype}-")[0]
        return verdict.output, purpose, verdict.status

    for (output, purpose, status), each in itertools.groupby(sorted(wrong, key=family), family):
        verdicts = list(each)
        worst = max(verdicts, key=lambda verdict: _grade(verdict).worst_excess)
        grade, evidence = _grade(worst), dict[str, Any]()
        if status == "nonfinite":
            says = f"{output} is {grade.got:g} in {purpose}, where the exact value is "
            says += f"{grade.exact:.6g}"
        else:
            says = f"{output} is {grade.ulp:.2g} ulp off in {purpose}, "
            says += f"{grade.worst_excess:.2g} times what serial sums may lose"
            evidence = {
                "ulp": grade.ulp,
                "share_of_serial": grade.worst_excess,
                "condition": grade.condition,
                "where": grade.where,
            }
        where = ", ".join(sorted({f"{v.dtype} {v.layout}" for v in verdicts}))
        yield _finding(
            f"{output}-{status}", f"{says} ({where})", verdicts, results,
            first=worst.case, evidence=evidence,
        )  # fmt: skip


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
        number = len(verdicts)
        named = [v.case for v in verdicts[:_NAMED]] + ["..."] * (number > _NAMED)
        what, _, details = verdicts[0].text.partition("; ")
        says = f"{what} in {counted(number, 'case')}: {', '.join(named)}; {details}"
        yield _finding(ids[status], says, verdicts, results)


def _faults(results: Results) -> Iterator[Finding]:
    for status, says in _FAULTS.items():
        verdicts = [v for v in results.verdicts if v.status == status]
        if verdicts:
            first, finding = verdicts[0], _finding(status, says, verdicts, results)
            text = says.format(outputs=", ".join(finding.outputs))
            if status in _EVENTS:
                text += f": {first.text}"
            elif len({v.text for v in verdicts}) == 1:
                text += first.text.removeprefix(status)
            yield replace(finding, says=text)


def _below(results: Results, at_least: Rung) -> Iterator[Finding]:
    worse = RUNGS[RUNGS.index(at_least) + 1 :]
    for output in results.operation.results:
        verdicts = [v for v in results.verdicts if v.output == output and v.status in worse]
        if verdicts:
            worst = max(verdicts, key=lambda v: RUNGS.index(v.status))
            says = f"{output} is as accurate as {worst.status}, not {at_least}"
            yield _finding(f"{output}-{worst.status}", says, verdicts, results, first=worst.case)


def _command(finding: Finding, results: Results, at_least: Rung) -> str:
    """Return the command that repeats the first case of a finding; "" for results of files."""
    job, selection = results.job, results.job.selection
    if job.files:
        return ""
    dtype = next(v.dtype for v in results.verdicts if v.case == finding.first)
    options: list[tuple[str, object, object]] = [
        ("--operation", selection.operation, "backward"),
        ("--dialect", job.dialect, None),
        ("--op", job.op, None),
        *(("--shape", ",".join(map(str, shape)), None) for shape in selection.shapes),
        ("--tier", selection.tier, "smoke"),
        ("--huge", finding.first.startswith("beyond-int32-"), False),
        ("--dtypes", dtype, dtype if dtype in Selection().dtypes else None),
        ("--seed", selection.seed, 0),
        ("--at-least", at_least, "serial"),
        ("--timeout", f"{job.timeout:g}", f"{Job(job.subject).timeout:g}"),
        ("--memory", job.memory, 0),
        ("--any-order", job.any_order, False),
    ]
    words = ["backnorm", "verify", *["--command"] * job.command, shlex.quote(job.subject)]
    for option, value, usual in options:
        if value != usual:
            words += [option] if value is True else [option, str(value)]
    return " ".join([*words, "--only", shlex.quote(finding.first), "--show"])
