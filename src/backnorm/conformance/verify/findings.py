"""Summarise verdicts as findings: sentences that describe mistakes."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from backnorm.conformance._naming import AS_ROUNDED
from backnorm.conformance._naming import sentence as in_words
from backnorm.conformance.diagnosis import Diagnosis
from backnorm.conformance.formula import FEW_BITS
from backnorm.conformance.ladder import RUNGS, Grade, Rung
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.conditions import condition
from backnorm.conformance.verify.draws import described, is_drawn
from backnorm.conformance.verify.options import Options
from backnorm.conformance.verify.run import Results, group_of, is_diagnostic
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
# The mistake that makes sizes unequal in cases of other shapes than the diagnostic ones.
_MISREAD = ("layout-ignored",)
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
    drawn = [v for v in results.verdicts if is_drawn(v.case) and not v.passed]
    of_selection = replace(
        results,
        verdicts=[v for v in results.verdicts if v.passed or not is_drawn(v.case)],
        diagnoses={name: d for name, d in results.diagnoses.items() if not is_drawn(name)},
    )
    of_formula = list(_of_formula(of_selection))
    of_formula = _joined(of_selection, [*of_formula, *_of_conditions(of_selection, of_formula)])
    misread = [each for each in of_formula if (each.id,) == _MISREAD]
    unread = [v for v in of_selection.verdicts if not any(each.explains(v) for each in misread)]
    others = [
        *_of_numbers(of_selection, of_formula),
        *_unusable(replace(of_selection, verdicts=unread)),
        *_faults(replace(of_selection, verdicts=unread)),
        *_below(of_selection, at_least),
    ]
    found = of_formula + sorted(others, key=lambda finding: -len(finding.cases))
    found += _of_draws(replace(results, verdicts=drawn))
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
    groups = {name: group_of(recipe) for name, recipe in results.recipes.items()}
    # The names of cases with at most one element per channel, so that a sum has one term.
    single = {name for name, recipe in results.recipes.items() if recipe.count <= 1}
    # Lists of the cases that have one mistake.
    causes: list[list[str]] = []
    for case, diagnosis in results.diagnoses.items():
        if case not in names or not is_diagnostic(case):
            continue
        alike = (each for each in causes if results.diagnoses[each[0]].agrees(diagnosis))
        cause = next(alike, None)
        if cause is None:
            causes.append([case])
        else:
            is_clearer = diagnosis.is_clearer_than(results.diagnoses[cause[0]])
            cause.insert(0 if is_clearer else len(cause), case)
    of_diagnosed = {case for each in causes for case in each}
    for each in causes:
        diagnosis = results.diagnoses[each[0]]
        says, shown = diagnosis.says, {groups[case] for case in each}
        explained = [verdict for verdict in inexact if groups[verdict.case] in shown]
        outputs = {verdict.output for verdict in explained if verdict.case in of_diagnosed}
        explained = [verdict for verdict in explained if verdict.output in outputs]
        if diagnosis.names == _MISREAD:
            explained += [v for v in results.verdicts if _misfits(v) and groups[v.case] in shown]
        if diagnosis.kind == "precision" and any(
            verdict.case in single and _exceeds_few_bits(verdict) for verdict in explained
        ):
            says = f"{says.removesuffix(AS_ROUNDED)}, but wrong for one element per channel: "
            says += "an element may be added twice, or be missing"
        yield _finding(
            "-".join(diagnosis.names) or diagnosis.kind, says, explained, results,
            first=each[0], evidence=diagnosis.evidence, is_diagnosis=True,
        )  # fmt: skip


def _misfits(verdict: Verdict) -> bool:
    """Whether the call failed, or the output has a wrong type or shape."""
    return verdict.status in ("error", "wrong") and verdict.grade is None


def _of_draws(results: Results) -> Iterator[Finding]:
    """Yield a finding for each drawn case; all verdicts of the results fail."""
    for case, each in itertools.groupby(results.verdicts, lambda verdict: verdict.case):
        verdicts = list(each)
        alone = replace(results, verdicts=verdicts)
        found = next(itertools.chain(_unusable(alone), _faults(alone)), None)
        if found is None:
            diagnosis = results.diagnoses.get(case)
            # The few numbers of a small case may agree with a fitted mistake by chance.
            if diagnosis is None or diagnosis.is_fitted:
                places = "" if diagnosis is None else diagnosis.places
                says = places or in_words([verdict.output for verdict in verdicts], "is wrong")
                found = _finding("drawn", says, verdicts, results)
            else:
                mistake = "-".join(diagnosis.names) or "drawn"
                found = _finding(mistake, diagnosis.says, verdicts, results)
                found = replace(found, evidence=diagnosis.evidence)
        where = described(results.recipes[case])
        yield replace(found, says=f"{found.says}, in the smallest drawn case: {where}")


def _exceeds_few_bits(verdict: Verdict) -> bool:
    """Whether the error is larger than any that computing in a type of few bits can cause."""
    grade = _grade(verdict)
    return abs(grade.got - grade.exact) > FEW_BITS * grade.condition * abs(grade.exact)


def _grade(verdict: Verdict) -> Grade:
    assert verdict.grade is not None
    return verdict.grade


def _unexplained(results: Results, explained: Sequence[Finding]) -> list[Verdict]:
    """Return the verdicts on wrong numbers that no finding explains."""
    return [
        verdict for verdict in results.verdicts
        if verdict.is_inexact and not any(each.explains(verdict) for each in explained)
    ]  # fmt: skip


def _of_conditions(results: Results, explained: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings for wrong outputs whose cases have something in common.

    One finding covers all cases, if a condition separates them from the cases that pass. Else there
    is one for each set of outputs that are wrong in the same cases, or for each kind of data, or
    for the cases that a diagnosis explains.
    """
    wrong = _unexplained(results, explained)
    outputs: dict[str, set[str]] = {}
    for verdict in wrong:
        outputs.setdefault(verdict.case, set()).add(verdict.output)
    if not outputs.keys() <= results.facts.keys():
        return
    failed = {verdict.case for verdict in results.verdicts if not verdict.passed}
    passing = [facts for name, facts in results.facts.items() if name not in failed]
    kinds: list[Callable[[str], str]] = [
        lambda name: "",
        lambda name: " ".join(sorted(outputs[name])),
        lambda name: str(group_of(results.recipes[name])),
        lambda name: results.facts[name].purpose,
    ]
    done: set[str] = set()
    for k, kind in enumerate(kinds):
        for _, each in itertools.groupby(sorted(outputs.keys() - done, key=kind), kind):
            names = list(each)
            verdicts = [verdict for verdict in wrong if verdict.case in names]
            says = condition([results.facts[name] for name in names], passing)
            known = _hint_of(results, names[0]) if k == 2 else None
            if len(verdicts) > 1 and (says is not None or known is not None):
                done |= set(names)
                yield _of_group(results, verdicts, says, known)


def _hint_of(results: Results, name: str) -> Diagnosis | None:
    """Return the mistake that was named from another case like this one."""
    group = group_of(results.recipes[name])
    of_group = (d for n, d in results.diagnoses.items() if group_of(results.recipes[n]) == group)
    return next((each for each in of_group if each.names), None)


def _of_group(
    results: Results, verdicts: Sequence[Verdict], says: str | None, known: Diagnosis | None
) -> Finding:
    """Return the finding of wrong outputs that meet a condition, or have a known diagnosis."""
    worst = max(verdicts, key=lambda verdict: _grade(verdict).worst_excess)
    cases = {verdict.case for verdict in verdicts}
    hints = [each for name, each in results.diagnoses.items() if name in cases]
    if known is not None:
        hints.append(known)
    # A diagnosis that names one mistake comes before one that cannot tell two.
    hints.sort(key=lambda each: (not each.names, each.is_ambiguous))
    text, evidence = (hints[0].says, hints[0].evidence) if hints else (_size(worst)[0], {})
    if says is not None:
        wrong = {verdict.output for verdict in verdicts}
        names = [name for name in results.operation.results if name in wrong]
        where = f"in {counted(len(cases), 'case')} where {says}, and in no other"
        text = f"{in_words(names, 'is wrong')} {where}: {text}"
    mistake = "-".join(hints[0].names) if hints else ""
    return _finding(
        mistake or "condition", text, verdicts, results, first=worst.case, evidence=evidence
    )


def _joined(results: Results, found: Iterable[Finding]) -> list[Finding]:
    """Join the findings that name the same mistake in a formula. One of them may also name others
    from which it cannot tell the mistake.

    Each of two findings may say that its cases meet a condition "and no other". Together they name
    the mistake alone.
    """
    known = results.diagnoses.values()
    named = {"-".join(each.names): each for each in known if each.kind == "formula"}
    joined: list[Finding] = []
    for each in found:
        alike = (k for k, other in enumerate(joined) if {each.id, other.id} <= named.keys())
        k = next((k for k in alike if named[each.id].agrees(named[joined[k].id])), len(joined))
        if k == len(joined):
            joined.append(each)
            continue
        first = joined[k]
        clear = each if named[each.id].is_clearer_than(named[first.id]) else first
        words = clear.says if clear.is_diagnosis else named[clear.id].says
        outputs = tuple(dict.fromkeys((*first.outputs, *each.outputs)))
        joined[k] = replace(clear, says=words, cases=first.cases | each.cases, outputs=outputs)
    return joined


def _size(verdict: Verdict, where: str = "") -> tuple[str, dict[str, Any]]:
    """Return how wrong an output is, in words and in numbers."""
    grade, output = _grade(verdict), verdict.output
    if verdict.status == "nonfinite":
        return f"{output} is {grade.got:g}{where}, where the exact value is {grade.exact:.6g}", {}
    says = f"{output} is {grade.ulp:.2g} ulp off{where}, "
    says += f"{grade.worst_excess:.2g} times what serial sums may lose"
    return says, {
        "ulp": grade.ulp,
        "share_of_serial": grade.worst_excess,
        "condition": grade.condition,
        "where": grade.where,
    }


def _of_numbers(results: Results, explained: Sequence[Finding]) -> Iterator[Finding]:
    """Yield findings for wrong outputs that no other finding explains.

    Wrong outputs make one finding if they have the same name (such as dx) and the same status, and
    if their cases have the same kind of data.
    """
    wrong = _unexplained(results, explained)

    def family(verdict: Verdict) -> tuple[str, str, str]:
        return verdict.output, results.recipes[verdict.case].purpose, verdict.status

    for (output, purpose, status), each in itertools.groupby(sorted(wrong, key=family), family):
        verdicts = list(each)
        worst = max(verdicts, key=lambda verdict: _grade(verdict).worst_excess)
        says, evidence = _size(worst, f" in {purpose}")
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
        *(("--shape", ",".join(map(str, shape)), None) for shape in selection.shapes),
        ("--tier", selection.tier, "smoke"),
        ("--huge", finding.first.startswith("beyond-int32-"), False),
        ("--dtypes", dtype, dtype if dtype in Selection().dtypes else None),
        ("--seed", selection.seed, 0),
        ("--at-least", at_least, "serial"),
        *(
            (f"--{each.name.replace('_', '-')}", getattr(job, each.name), each.default)
            for each in fields(Options)
            if each.name not in ("command", "solution", "budget")
        ),
    ]
    kind = ["--command"] * job.command + ["--solution"] * job.solution
    words = ["backnorm", "verify", *kind, shlex.quote(job.subject)]
    for option, value, usual in options:
        if value != usual:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            words += [option] if value is True else [option, text]
    return " ".join([*words, "--only", shlex.quote(finding.first), "--show"])
