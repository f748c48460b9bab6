"""Write the tables of docs/conformance.md and two pictures from docs/conformance.json.

With --measure: first run every implementation, and write docs/conformance.json after each; this
takes ten minutes, and needs the whole dependency group `test`. With names after --measure: only
the implementations of these packages (as `torch`, `oneDNN`), `tests` or `points`. With --check:
say whether the page is current, and write nothing.

Usage: python -m scripts.make_conformance_page [--measure [PART ...] | --check]
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import RUNGS, bound
from scripts.conformance_field import DRAWN, ROOT, SHAPE, measured
from scripts.generated import between, options, write_or_check

RESULT = ROOT / "docs" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
STYLE = ROOT / "benchmarks" / "figures.mplstyle"

# Bounds of errors in the picture: rung, kind, style of the line.
_BOUNDS = (("serial", "guaranteed", ":"), ("serial", "expected", "--"),
           ("float32", "guaranteed", "-"))  # fmt: skip
_DATA = f"x of shape {SHAPE}, channels last"
_ELEMENTS = math.prod(SHAPE[:-1])


def page(text: str, result: dict[str, Any]) -> str:
    """Return the page with the tables of a result between its markers."""
    subjects = result["subjects"]
    parts = {
        "machine": f"Measured on {'; '.join(sorted({s['measured'] for s in subjects}))}.\n",
        "rungs": _rungs(subjects),
        "findings": _findings(subjects),
        "tests": _tests(result["tests"]),
        "passing": _passing(result["tests"]),
        "subjects": _subjects(subjects),
    }
    for name, part in parts.items():
        text = between(PAGE.name, text, f"\n{part}", name)
    return text


def _subjects(subjects: Iterable[dict[str, Any]]) -> str:
    rows = (
        (s["label"], s["version"], f"`{s['command']}`", f"{s['cases']} of {s['of']}",
         "; ".join(s["refused"]))
        for s in subjects
    )  # fmt: skip
    head = "Implementation", "Version", "Command", "Cases judged", "Refused"
    return _table(head, rows)


def _rungs(subjects: Sequence[dict[str, Any]]) -> str:
    columns = list(subjects[0]["cells"])
    rows = (
        (
            s["label"] if output == "dx" else "",
            output,
            *(_cell(s["cells"][c][output]) for c in columns),
        )
        for s in subjects
        for output in GRADIENTS
    )
    return _table(("Implementation", "", *columns), rows)


def _cell(statuses: str) -> str:
    words = {"refused": "\N{EN DASH}"} | {each: each for each in (*RUNGS, "not_run")}
    return ", ".join(words.get(each, f"**{each.upper()}**") for each in statuses.split(", "))


def _findings(subjects: Iterable[dict[str, Any]]) -> str:
    rows = (
        (s["label"], _short(f["says"]), str(f["findings"]), str(f["cases"]),
         f"`{f['reproduce'].removeprefix('backnorm verify ').removesuffix(' --show')}`")
        for s in subjects
        for f in s["findings"]
    )  # fmt: skip
    head = "Implementation", "Finding", "Findings", "Cases", "`backnorm verify ... --show`"
    return _table(head, rows)


def _short(finding: str) -> str:
    """Return a finding without text that the heading or the table of rungs already has."""
    finding = re.sub(r" \((?:b?float\d+ \w+(?:, )?)+\)$", "", finding)
    return finding.replace(" what serial sums may lose", "")


def _tests(tests: Sequence[dict[str, Any]]) -> str:
    head = ("Test", "Tolerance in float32", "Data", "Caught", "Cannot show",
            "Right ones rejected (serial, pairwise, float64)", "Source")  # fmt: skip
    # tests/conformance/test_proof.py shows what this row says.
    number = str(_wrong(tests[0]))
    rows = [("**`backnorm verify`**", "the ladder", "its cases", f"{number} of {number}", "0",
             "0, 0, 0", "")]  # fmt: skip
    for t in sorted(tests, key=lambda t: -t["caught"] / _wrong(t)):
        alarms = ", ".join(map(str, t["false_alarms"].values()))
        loss = "" if t["loss"] == "none" else f", loss {t['loss']}"
        rows.append((t["label"], f"`{t['tolerance']}`", t["data"] + loss,
                     f"{t['caught']} of {_wrong(t)}", str(len(t["invisible"])),
                     f"{alarms} of {t['runs']}", t["source"]))  # fmt: skip
    return _table(head, rows)


def _wrong(test: dict[str, Any]) -> int:
    """Return the number of wrong kernels with which a test was tested."""
    return int(test["caught"]) + len(test["missed"]) + len(test["invisible"])


def _passing(tests: Iterable[dict[str, Any]]) -> str:
    rows = (
        (t["label"], t["forgives"], f"{_wrong(t) - t['caught']} of {_wrong(t)}",
         " ".join(f"`{name}`" for name in (*t["missed"], *t["invisible"])))
        for t in tests if t["forgives"]
    )  # fmt: skip
    return _table(("Test", "Forgives", "Pass", "Wrong kernels that pass"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def draw(points: dict[str, list[list[float]]]) -> None:
    """Plot errors against condition numbers: every point, and the largest of each decade."""
    found = {name: np.array(points[name]).T for name in reversed(DRAWN)}
    with _axes("conformance.svg", (5.5, 5.5), fontsize="small", markerscale=2) as axes:
        for name, (conditions, errors) in found.items():
            label, colour = DRAWN[name]
            shown = errors > 0
            axes.plot(
                conditions[shown], errors[shown], "o", ms=2.5, color=colour, label=label, mew=0
            )
        single, unit = np.dtype(np.float32), 2.0**-24
        line, dense = axes.xaxis.label.get_color(), np.logspace(0, 6, 61)
        for rung, kind, style in _BOUNDS:
            terms = bound(rung, "dx", single, single, _ELEMENTS, kind=kind).terms
            word = "never beyond" if kind == "guaranteed" else "expected"
            label = f"{word}: {rung}, {terms / unit:.0f} u T"
            axes.plot(dense, unit + terms * dense, style, color=line, lw=1, label=label)
        axes.axhline(unit, ls="-.", color=line, lw=1, label="rounded once: u = 2⁻²⁴")
        axes.set(
            ylim=(1e-10, 1e4),
            xlabel="condition number T/|exact|",
            ylabel="relative error of dx",
            title=f"float32, {_DATA}",
        )
    with _axes("error.svg", (5.5, 4)) as axes:
        for name, (conditions, errors) in found.items():
            label, colour = DRAWN[name]
            decades = np.floor(np.log10(conditions)).astype(int)
            worst = [errors[decades == each].max() for each in range(6)]
            # TensorFlow has nearly the same errors: its line is drawn on this wide one.
            lw = 6 if name == "torch" else 2
            axes.plot(
                10 ** (np.arange(6) + 0.5), worst, "o-", color=colour, lw=lw, ms=lw + 2, label=label
            )
        axes.set(
            ylim=(1e-8, 10),
            xlabel="condition number: how strongly terms of dx cancel",
            ylabel="relative error",
            title=f"Largest error of dx in float32\n{_DATA}",
        )


@contextmanager
def _axes(name: str, size: tuple[float, float], **legend: Any) -> Iterator[Any]:
    """Yield logarithmic axes of condition numbers up to 10⁶ and of errors; then write the file."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    with plt.style.context(STYLE):
        figure, axes = plt.subplots(figsize=size)
        axes.set(xscale="log", yscale="log", xlim=(1, 1e6))
        yield axes
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(
                lambda value, _: f"10{str(round(np.log10(value))).translate(raised)}"
            )
        figure.legend(loc="outside lower center", ncols=2, **legend)
        figure.savefig(ROOT / "docs" / name, metadata={"Date": None})
        plt.close(figure)


def main() -> int:
    """Write the page and the pictures; with --check, say whether the page is current."""
    requested = options(__doc__, measure="first run implementations, all or those of packages")
    if requested.measure is not None:
        stored = json.loads(RESULT.read_text(encoding="utf-8"))
        for step in measured(stored, requested.measure):
            RESULT.write_text(json.dumps(step, indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    if not requested.check:
        draw(result["points"])
    pages = {PAGE: page(PAGE.read_text(encoding="utf-8"), result)}
    return write_or_check(pages, check=requested.check)


if __name__ == "__main__":
    raise SystemExit(main())
