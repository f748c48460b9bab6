"""Renderers: a report as text, JSON, JUnit, Markdown, and known failures; a case as tables."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any
from xml.etree import ElementTree

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import backnorm
from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.battery import Case
from backnorm.conformance.ladder import RUNGS, GradientLadder, Ladder, is_at_least
from backnorm.conformance.verify.cases import DTYPES, LAYOUTS
from backnorm.conformance.verify.draws import is_drawn
from backnorm.conformance.verify.findings import Finding, mistake_of, sentence
from backnorm.conformance.verify.operations import catches, operation_of, wrong_kernels
from backnorm.conformance.verify.report import Report, known_failures
from backnorm.conformance.verify.run import Results
from backnorm.conformance.verify.verdicts import STATUSES, UNJUDGED, Verdict
from backnorm.errors import counted, visible

__all__ = ["RENDERERS", "about"]

_LEGEND = "cell: best arithmetic whose bounds hold, exact to serial (see backnorm tolerance)"

_FORMAT, _FORMAT_VERSION = "backnorm-verdict", 1
# A printed list names at most this number of reasons, cases or known failures.
_NAMED = 5


def _as_text(report: Report) -> Group:
    """Return the table of rungs, the findings and the counts. Lines are not wrapped."""
    parts: list[RenderableType] = [_line(_title(report)), "", _table(report), _line(_LEGEND)]
    for finding in report.findings:
        where = f"  [{_where(report.results, finding)}]"
        parts += ["", _line(finding.says, "bold").append(visible(where), "not bold")]
        if finding.evidence:
            parts.append(_line(f"  {_evidence(finding)}"))
        if finding.reproduce:
            parts.append(_line(f"  {finding.reproduce}"))
    parts += ["", *map(_line, _closing(report))]
    return Group(*parts)


def _line(text: str, style: str = "") -> Text:
    return Text(visible(text), style, no_wrap=True, overflow="ignore")


def _title(report: Report) -> str:
    job, selection = report.results.job, report.results.job.selection
    words = selection.operation if job.dialect is None else f"{job.dialect} {job.op or ''}".strip()
    place = f" on {job.tensors} {job.device}" if job.tensors else ""
    drawn = {v.case for v in report.results.verdicts if is_drawn(v.case)}
    number = len({v.case for v in report.results.verdicts} - drawn)
    known = {v.dtype for v in report.results.verdicts}
    dtypes = " ".join(dtype for dtype in selection.dtypes if dtype in known)
    seed = f", seed {selection.seed}" * bool(drawn or selection.seed)
    return (
        f"{job.subject} as {words}{place}, {dtypes}, {counted(number, 'case')} "
        f"({selection.tier}{seed}){f', {len(drawn)} drawn' * bool(drawn)}, "
        f"{report.results.seconds:.1f} s"
    )


def _closing(report: Report) -> Iterator[str]:
    """Yield the lines below the findings: counts, reasons and known failures."""
    verdicts = report.results.verdicts
    yield _summary(report)
    for line in _reasons(verdicts):
        yield f"  {line}"
    nothing = dict.fromkeys(
        v.case for v in verdicts if v.status == "proves_nothing" and not is_drawn(v.case)
    )
    for case in list(nothing)[:_NAMED]:
        yield f"  {case} proves nothing: every wrong formula passes"
    if report.results.interrupted:
        yield "interrupted: the cases that are missing were not judged"
    for title, lines in {
        "known failures that no output of this run shows:": report.unmet,
        "known failures that have expired:": report.expired,
    }.items():
        more = len(lines) - _NAMED
        yield from [title] * bool(lines)
        yield from (f"  {line}" for line in lines[:_NAMED])
        yield from [f"  and {more} more"] * (more > 0)


def _where(results: Results, finding: Finding) -> str:
    """Return a text that says in how many cases a finding was made, or that its case was drawn.

    If other element types were judged, but the finding was not made in them, the text also names
    the element types in which it was made; likewise for layouts.
    """
    if is_drawn(finding.first):
        return "drawn"
    judged = [verdict for verdict in results.verdicts if verdict.is_judged]
    text = f"{len(finding.cases)} of {counted(finding.of, 'case')}"
    for name, known in (("dtype", DTYPES), ("layout", LAYOUTS)):
        wrong = {getattr(v, name) for v in judged if v.case in finding.cases}
        if wrong < {getattr(verdict, name) for verdict in judged}:
            text += ", only " + " and ".join(each for each in known if each in wrong)
    return text


def _reasons(verdicts: Iterable[Verdict]) -> list[str]:
    """Return a line for each reason why outputs were refused or not run.

    For each of the two statuses, "refused" and "not_run", at most `_NAMED` lines are returned.
    """
    lines = []
    for status in ("refused", "not_run"):
        cases: dict[str, set[str]] = {}
        for verdict in verdicts:
            if verdict.status == status:
                cases.setdefault(verdict.text, set()).add(verdict.case)
        lines += [
            f"{status.replace('_', ' ')} in {counted(len(cases[text]), 'case')}: {text}"
            for text in sorted(cases)[:_NAMED]
        ]
    return lines


def _table(report: Report) -> Table:
    table = Table("", box=None, pad_edge=False)
    columns = _columns(report.results)
    for dtype, layout in columns:
        table.add_column(f"{dtype}\n{layout}", overflow="fold")
    for output in report.results.operation.results:
        table.add_row(output, *(_cell(report, output, *column) for column in columns))
    return table


def _columns(results: Results) -> list[tuple[str, str]]:
    """Return the element types and layouts that have verdicts."""
    present = {(v.dtype, v.layout) for v in results.verdicts}
    return [column for column in itertools.product(DTYPES, LAYOUTS) if column in present]


def _cell(report: Report, output: str, dtype: str, layout: str) -> Text:
    """Return the text of a cell: an output's faults, or its worst status if it has no fault."""
    key = output, dtype, layout
    own = [v for v in report.results.verdicts if (v.output, v.dtype, v.layout) == key]
    ordered = sorted({v.status for v in own}, key=STATUSES.index)
    judged = [status for status in ordered if status not in UNJUDGED]
    faults = [status for status in judged if not is_at_least(status, report.at_least)]
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


def _summary(report: Report) -> str:
    numbers = report.counts
    rest = [
        f"{n} {'in cases that prove nothing' if s == 'proves_nothing' else s.replace('_', ' ')}"
        for s, n in numbers.items()
        if s not in ("judged", "passed") and not is_at_least(s, report.at_least)
    ]
    parts = [f"{numbers['judged']} outputs judged: {numbers['passed']} passed", *rest]
    is_empty = report.is_empty and not report.results.interrupted
    empty = "; nothing was judged, which fails" * is_empty
    return f"{', '.join(parts)}; {counted(len(report.findings), 'finding')}{empty}"


def _as_elements(report: Report) -> Group:
    """Return each output's status, and the element whose error rules out the next better rung."""
    graded = (v for v in report.results.verdicts if v.grade is not None and v.grade.where)
    return Group(*(_line(f"{verdict.case} {verdict.says}") for verdict in graded))


def _as_json(report: Report) -> str:
    job = report.results.job
    fields = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "made_by": {"backnorm": backnorm.__version__},
        "subject": job.subject,
        "operation": job.selection.operation,
        "dialect": job.dialect or "canonical",
        **({"tensors": job.tensors, "device": job.device} if job.tensors else {}),
        "tier": job.selection.tier,
        "seed": job.selection.seed,
        "interrupted": report.results.interrupted,
        "counts": dict(report.counts),
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
            for each in report.findings
        ],
        "verdicts": [_verdict(v, mistake_of(v, report.findings)) for v in report.results.verdicts],
    }
    return json.dumps(fields, indent=1) + "\n"


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


def _as_junit(report: Report) -> str:
    """Return the report in JUnit's format, with one test for each output of a case.

    Verdicts whose status is no rung, but which do not fail, are skipped tests.
    """
    verdicts = report.results.verdicts
    suite = ElementTree.Element(
        "testsuite", name=visible(f"backnorm verify {report.results.job.subject}")
    )
    kinds: list[str] = []
    for verdict in verdicts:
        test = ElementTree.SubElement(
            suite, "testcase", classname=verdict.case, name=verdict.output
        )
        if not report.fails(verdict) and verdict.status in RUNGS:
            continue
        message = visible(sentence(verdict, report.findings))
        kinds.append("failure" if report.fails(verdict) else "skipped")
        element = ElementTree.SubElement(test, kinds[-1], message=message)
        if report.fails(verdict):
            element.set("type", verdict.status)
    suite.set("tests", str(len(verdicts)))
    suite.set("failures", str(kinds.count("failure")))
    suite.set("skipped", str(kinds.count("skipped")))
    ElementTree.indent(suite)
    text: bytes = ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True)
    return text.decode() + "\n"


def _as_markdown(report: Report) -> str:
    results, columns = report.results, _columns(report.results)
    lines = [f"## `backnorm verify {results.job.subject}`", ""]
    lines.append("| | " + " | ".join(" ".join(column) for column in columns) + " |")
    lines.append("|---" * (len(columns) + 1) + "|")
    for output in results.operation.results:
        cells = [str(_cell(report, output, *column)) for column in columns]
        lines.append(f"| {output} | " + " | ".join(cells) + " |")
    lines.append("")
    for each in report.findings:
        command = f": `{each.reproduce}`" * bool(each.reproduce)
        lines.append(f"- {each.says} ({_where(results, each)}){command}")
    lines += ["", _summary(report), ""]
    lines += [f"- {line}" for line in _reasons(results.verdicts)]
    return visible("\n".join(lines)) + "\n"


def _as_xfail(report: Report) -> str:
    """Return the findings, those of known failures too, as a file that ``--xfail`` reads."""
    job = report.results.job
    lines = [f"# CASE OUTPUT MISTAKE: known failures of {job.subject}"]
    results = report.results.operation.results
    for finding in report.every:
        lines += map(str, known_failures(finding, results))
    return visible("\n".join(lines)) + "\n"


def about(case: Case) -> Group:
    """Return the inputs of a case, the bounds of its outputs, and the kernels that fail it."""
    ladder, row = operation_of(case).ladder(case), case.data.normalization.row
    statistics = "training" if case.training else "frozen statistics"
    return Group(
        _line(
            f"{case.name}: {statistics}, {case.data.data_format}, epsilon {case.data.epsilon:g}, "
            f"{ladder.count} elements a {row}"
        ),
        "",
        _about_inputs(case),
        "",
        _about_outputs(case, ladder),
        _line("condition: median of T over the exact value; rungs: median bounds in ulps"),
        *(_about_kernels(case, ladder) if isinstance(ladder, GradientLadder) else ()),
    )


def _about_kernels(case: Case, ladder: Ladder) -> Iterator[Text]:
    caught, every = catches(case, ladder), [mistake.name for mistake in wrong_kernels(case)]
    passed = [name for name in every if name not in caught]
    yield _line("")
    for verb, names in (("rejects", caught), ("lets pass", passed)):
        yield _line(f"{verb} {len(names)} of {len(every)} wrong kernels: {', '.join(names)}")


def _about_inputs(case: Case) -> Table:
    table = _case_table("", "type", "shape", "least", "greatest", "mean", "deviation")
    for name, array in case.inputs.items():
        if array is None:
            table.add_row(name, "not passed")
            continue
        wide = array.astype(np.float64)
        with np.errstate(all="ignore"):
            facts = wide.min(), wide.max(), wide.mean(), wide.std()
        shape = "x".join(map(str, array.shape))
        table.add_row(name, str(array.dtype), shape, *(f"{fact:.4g}" for fact in facts))
    return table


def _about_outputs(case: Case, ladder: Ladder) -> Table:
    """Return a table with a column for each result. The rows are the result's type, the median
    and the largest condition number of its elements, and the median of each rung's bound, in ulps.
    """
    columns: list[list[str]] = []
    operation = operation_of(case)
    for name in operation.results:
        size, terms = np.abs(ladder.value(name).hi), ladder.terms(name)
        dtype = operation.types(case, name)[0]
        ulp = ulp_at(ladder.value(name), dtype)
        with np.errstate(all="ignore"):
            # For each element, `terms` has T, the sum of the magnitudes of the terms of the
            # element's formula. If T is 0, every term is 0, so the element has no rounding error,
            # and its condition number is set to 1.
            condition = np.divide(terms, size, out=np.ones_like(terms), where=terms != 0)
            bounds = [np.median(each / ulp) for each in ladder.allowances(name, dtype).values()]
        numbers = np.median(condition), condition.max(), *bounds
        columns.append([str(dtype), *(f"{each:.4g}" for each in numbers)])
    heads = "type", "condition", "worst condition", *ladder.allowances(name, dtype)
    table = _case_table("", *operation.results)
    for head, *cells in zip(heads, *columns, strict=True):
        table.add_row(head, *cells)
    return table


def _case_table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


#: Functions that take a report and return a text, or lines and tables that rich prints. The keys of
#: files are the command's options; "elements" has an element of each output.
RENDERERS: Mapping[str, Callable[[Report], RenderableType]] = MappingProxyType(
    {
        "text": _as_text,
        "elements": _as_elements,
        "json": _as_json,
        "junit": _as_junit,
        "markdown": _as_markdown,
        "write-xfail": _as_xfail,
    }
)
