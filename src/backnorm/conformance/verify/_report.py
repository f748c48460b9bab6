"""Reports of `backnorm verify` as a table, JSON, JUnit and Markdown."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table
from rich.text import Text

import backnorm
from backnorm.conformance.ladder import RUNGS, Rung, is_at_least
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS
from backnorm.conformance.verify.findings import Finding, counts, mistake_of, sentence
from backnorm.conformance.verify.run import STATUSES, UNJUDGED, Results, Verdict
from backnorm.errors import counted, visible

_LEGEND = "cell: best arithmetic whose bounds hold, exact to serial (see backnorm tolerance)"

FORMAT, FORMAT_VERSION = "backnorm-verdict", 1
#: A printed list names at most this number of reasons, cases or outputs.
NAMED = 5


def show(
    results: Results, found: Sequence[Finding], console: Console, at_least: Rung = "serial"
) -> None:
    """Print the table of rungs, the findings and the counts."""
    job, selection = results.job, results.job.selection
    words = selection.operation if job.dialect is None else f"{job.dialect} {job.op or ''}".strip()
    number = len({v.case for v in results.verdicts})
    console.print(
        f"{job.subject} as {words}, {' '.join(selection.dtypes)}, {counted(number, 'case')} "
        f"({selection.tier}), {results.seconds:.1f} s",
    )
    console.print()
    console.print(_table(results, at_least))
    console.print(_LEGEND, soft_wrap=True)
    for finding in found:
        console.print()
        where = _where(results, finding)
        style = "" if finding.known else "bold"
        says = console.render_str("known: " * finding.known + finding.says, style=style)
        console.print(says, f"  [{where}]", sep="")
        if finding.evidence:
            console.print(f"  {_evidence(finding)}")
        if finding.reproduce:
            console.print(f"  {finding.reproduce}", soft_wrap=True)
    console.print()
    console.print(_summary(results, found, at_least), soft_wrap=True)
    for line in _reasons(results):
        console.print(f"  {line}", soft_wrap=True)
    nothing = list(dict.fromkeys(v.case for v in results.verdicts if v.status == "proves_nothing"))
    for case in nothing[:NAMED]:
        console.print(f"  {case} proves nothing: every wrong formula passes")
    if results.interrupted:
        console.print("interrupted: the cases that are missing were not judged")


def _where(results: Results, finding: Finding) -> str:
    """Return a text that says in how many cases a finding was made.

    If other element types were judged, but the finding was not made in them, the text also names
    the element types in which it was made; likewise for layouts.
    """
    judged = [verdict for verdict in results.verdicts if verdict.is_judged]
    text = f"{len(finding.cases)} of {counted(finding.of, 'case')}"
    for name, known in (("dtype", DTYPES), ("layout", LAYOUTS)):
        wrong = {getattr(v, name) for v in judged if v.case in finding.cases}
        if wrong < {getattr(verdict, name) for verdict in judged}:
            text += ", only " + " and ".join(each for each in known if each in wrong)
    return text


def _reasons(results: Results) -> list[str]:
    """Return a line for each reason why outputs were refused or not run.

    For each of the two statuses, "refused" and "not_run", at most `NAMED` lines are returned.
    """
    lines = []
    for status in ("refused", "not_run"):
        cases: dict[str, set[str]] = {}
        for verdict in results.verdicts:
            if verdict.status == status:
                cases.setdefault(verdict.text, set()).add(verdict.case)
        lines += [
            f"{status.replace('_', ' ')} in {counted(len(cases[text]), 'case')}: {text}"
            for text in sorted(cases)[:NAMED]
        ]
    return lines


def _table(results: Results, at_least: Rung) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    columns = _columns(results)
    for dtype, layout in columns:
        table.add_column(f"{dtype}\n{layout}", overflow="fold")
    for output in results.operation.results:
        table.add_row(output, *(_cell(results, output, *column, at_least) for column in columns))
    return table


def _columns(results: Results) -> list[tuple[str, str]]:
    """Return the element types and layouts that have verdicts."""
    present = {(v.dtype, v.layout) for v in results.verdicts}
    return [column for column in itertools.product(DTYPES, LAYOUTS) if column in present]


def _cell(results: Results, output: str, dtype: str, layout: str, at_least: Rung) -> Text:
    """Return the text of a cell: an output's faults, or its worst status if it has no fault."""
    key = output, dtype, layout
    statuses = {v.status for v in results.verdicts if (v.output, v.dtype, v.layout) == key}
    ordered = [status for status in STATUSES if status in statuses]
    judged = [status for status in ordered if status not in UNJUDGED]
    faults = [status for status in judged if not is_at_least(status, at_least)]
    if faults:
        return Text(", ".join(faults).upper().replace("_", " "), style="bold red")
    shown = (judged or ordered)[-1:]
    if judged and "expected_to_fail" in ordered:
        shown.append("expected_to_fail")
    return Text(", ".join(shown).replace("_", " "))


def _evidence(finding: Finding) -> str:
    def text(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{name} {text(value)}" for name, value in finding.evidence.items())


def _summary(results: Results, found: Sequence[Finding], at_least: Rung) -> str:
    numbers = counts(results, at_least)
    rest = [
        f"{n} {'in cases that prove nothing' if s == 'proves_nothing' else s.replace('_', ' ')}"
        for s, n in numbers.items()
        if s not in ("judged", "passed") and not is_at_least(s, at_least)
    ]
    parts = [f"{numbers['judged']} outputs judged: {numbers['passed']} passed", *rest]
    known = sum(each.known for each in found)
    total = counted(len(found) - known, "finding") + f", {known} known" * bool(known)
    is_empty = not (numbers["judged"] or "expected_to_fail" in numbers or results.interrupted)
    return f"{', '.join(parts)}; {total}" + "; nothing was judged, which fails" * is_empty


def show_case(results: Results, console: Console) -> None:
    """Print each output's status, and the element whose error rules out the next better rung."""
    for verdict in results.verdicts:
        grade = verdict.grade
        if grade is None or not grade.where:
            continue
        index = ", ".join(map(str, grade.where))
        console.print(
            f"{verdict.case} {verdict.output}[{index}]: {verdict.status}; got {grade.got!r} "
            f"({float(grade.got).hex()}), exact {grade.exact!r} ({float(grade.exact).hex()}), "
            f"error {grade.ulp:.4g} ulp, condition {grade.condition:.3g}",
            soft_wrap=True,
        )


def as_json(results: Results, found: Sequence[Finding], at_least: Rung = "serial") -> str:
    """Return the report as JSON."""
    job = results.job
    report = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "made_by": {"backnorm": backnorm.__version__},
        "subject": job.subject,
        "operation": job.selection.operation,
        "dialect": job.dialect or "canonical",
        "tier": job.selection.tier,
        "seed": job.selection.seed,
        "interrupted": results.interrupted,
        "counts": counts(results, at_least),
        "findings": [
            {
                "id": each.id,
                "says": each.says,
                "outputs": list(each.outputs),
                "cases": len(each.cases),
                "of": each.of,
                "first": each.first,
                "evidence": {n: _plain(v) for n, v in each.evidence.items()},
                "reproduce": each.reproduce,
            }
            for each in found
        ],
        "verdicts": [_verdict(verdict, mistake_of(verdict, found)) for verdict in results.verdicts],
    }
    return json.dumps(report, indent=1) + "\n"


def _verdict(verdict: Verdict, mistake: str | None) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "case": verdict.case,
        "output": verdict.output,
        "dtype": verdict.dtype,
        "layout": verdict.layout,
        "status": verdict.status,
    }
    if verdict.text:
        plain["text"] = verdict.text
    if mistake is not None:
        plain["mistake"] = mistake
    grade = verdict.grade
    if grade is not None:
        plain |= {
            "ulp": _plain(grade.ulp),
            "share": {rung: _plain(value) for rung, value in grade.share.items()},
            "where": list(grade.where),
            "got": float(grade.got).hex(),
            "exact": float(grade.exact).hex(),
            "condition": _plain(grade.condition),
        }
    return plain


def _plain(value: Any) -> Any:
    """Return a value in a form for JSON: a list for a tuple, None for NaN and infinities."""
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def as_junit(results: Results, found: Sequence[Finding], fails: Callable[[Verdict], bool]) -> str:
    """Return the report in JUnit's format, with one test for each output of a case.

    Parameters
    ----------
    results : Results
    found : sequence of Finding
    fails : callable
        Whether a verdict is a failure. Other verdicts whose status is no rung are skipped tests.
    """
    name = visible(f"backnorm verify {results.job.subject}")
    suite = ElementTree.Element("testsuite", name=name)
    failed = skipped = 0
    for verdict in results.verdicts:
        test = ElementTree.SubElement(
            suite, "testcase", classname=verdict.case, name=verdict.output
        )
        message = visible(sentence(verdict, found))
        if fails(verdict):
            failed += 1
            ElementTree.SubElement(test, "failure", type=verdict.status, message=message)
        elif verdict.status not in RUNGS:
            skipped += 1
            ElementTree.SubElement(test, "skipped", message=message)
    suite.set("tests", str(len(results.verdicts)))
    suite.set("failures", str(failed))
    suite.set("skipped", str(skipped))
    ElementTree.indent(suite)
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text.decode() + "\n"


def as_markdown(results: Results, found: Sequence[Finding], at_least: Rung = "serial") -> str:
    """Return the table and the findings as Markdown."""
    columns = _columns(results)
    lines = [f"## `backnorm verify {results.job.subject}`", ""]
    lines.append("| | " + " | ".join(" ".join(column) for column in columns) + " |")
    lines.append("|---" * (len(columns) + 1) + "|")
    for output in results.operation.results:
        cells = [str(_cell(results, output, *column, at_least)) for column in columns]
        lines.append(f"| {output} | " + " | ".join(cells) + " |")
    lines.append("")
    for each in found:
        where = _where(results, each)
        command = f": `{each.reproduce}`" * bool(each.reproduce)
        lines.append(f"- {'known: ' * each.known}{each.says} ({where}){command}")
    lines += ["", _summary(results, found, at_least), ""]
    lines += [f"- {line}" for line in _reasons(results)]
    return visible("\n".join(lines)) + "\n"
