"""Write the tables of docs/conformance.md and two pictures from docs/conformance.json.

With --measure: first run every implementation and write docs/conformance.json; this takes five
minutes, and needs the whole dependency group `test`. With --check: say whether the page is current,
and write nothing.

Usage: python scripts/make_conformance_page.py [--measure | --check]
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from backnorm.conformance.judge import GRADIENTS
from backnorm.conformance.ladder import RUNGS, bound
from conformance_field import REPRODUCTION, measured
from generated import between, options, write_or_check

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "docs" / "conformance.json"
PAGE = ROOT / "docs" / "conformance.md"
PICTURE = ROOT / "docs" / "conformance.svg"
OVERVIEW = ROOT / "docs" / "error.svg"

# Labels and colours of the picture's implementations, the worst last.
_DRAWN = {"backnorm": ("backnorm", "#0072b2"), "torch": ("PyTorch", "#e69f00"),
          "tensorflow": ("TensorFlow (Eigen)", "#cc79a7"),
          "numpy": ("NumPy, textbook formula", "#555555")}  # fmt: skip
DASH = "\N{EN DASH}"
_ELEMENTS = 32 * 28 * 28


def page(text: str, result: dict[str, Any]) -> str:
    """Return the page with the tables of a result between its markers."""
    subjects = result["subjects"]
    parts = {
        "machine": f"Measured on {result['date']} on {result['machine']}.\n",
        "rungs": _rungs(subjects),
        "findings": _findings(subjects),
        "second-order": _second_order(result["second_order"]),
        "reproduction": f"```python\n{REPRODUCTION}```\n\n```text\n{result['reproduction']}```\n",
        "tests": _tests(result),
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


def _cell(status: str) -> str:
    if status == "refused":
        return DASH
    return status if status in (*RUNGS, "not_run") else f"**{status.upper()}**"


def _findings(subjects: Iterable[dict[str, Any]]) -> str:
    rows = (
        (s["label"], _short(f["says"]), f"`{_arguments(f['reproduce'])}`")
        for s in subjects
        for f in s["findings"]
    )
    return _table(("Implementation", "Finding", "`backnorm verify ... --show`"), rows)


def _arguments(command: str) -> str:
    return command.removeprefix("backnorm verify ").removesuffix(" --show")


def _short(finding: str) -> str:
    """Return a finding without text that the heading or the table of rungs already has."""
    finding = re.sub(r" \((?:b?float\d+ \w+(?:, )?)+\)$", "", finding)
    return finding.replace(" what serial sums may lose", "")


def _second_order(result: dict[str, dict[str, list[float]]]) -> str:
    rows = (
        (label, dtype, *(f"{error:g}" for error in errors))
        for label, by_type in result.items()
        for dtype, errors in by_type.items()
    )
    return _table(("Implementation", "Type", "x", "dy", "gamma"), rows)


def _tests(result: dict[str, Any]) -> str:
    def rows() -> Iterator[Sequence[str]]:
        for t in sorted(result["tests"], key=lambda t: -t["caught"]):
            alarms = ", ".join(str(n) for n in t["false_alarms"].values())
            loss = "" if t["loss"] == "none" else f", loss {t['loss']}"
            yield (t["label"], f"`{t['tolerance']}`", t["data"] + loss, str(t["caught"]),
                   str(t["invisible"]), alarms, t["source"])  # fmt: skip

    battery = result["battery"]
    (runs,) = {t["runs"] for t in result["tests"]}
    alarms = ", ".join(str(n) for n in battery["false_alarms"].values())
    own = ("**`backnorm verify`**", "the ladder", f"its {battery['runs']} cases",
           str(battery["caught"]), "0", f"{alarms} of {battery['runs']}", "")  # fmt: skip
    head = ("Test", "Tolerance in float32", "Data", f"Caught of {battery['of']}", "Cannot show",
            f"Right ones rejected of {runs} (serial, pairwise, float64)", "Source")  # fmt: skip
    return _table(head, [own, *rows()])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


def draw(points: dict[str, list[list[float]]], path: Path) -> None:
    """Plot errors and their bounds against condition numbers."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "backnorm", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    # Draw the worst implementations first, below the others.
    for name in reversed(_DRAWN):
        label, colour = _DRAWN[name]
        conditions, errors = np.array(points[name]).T
        shown = errors > 0
        axes.loglog(conditions[shown], errors[shown], "o", ms=2.5, color=colour, label=label, mew=0)
    condition = np.logspace(0, 6, 2)
    single, unit = np.dtype(np.float32), 2.0**-24
    for rung, kind, style in (
        ("serial", "guaranteed", ":"),
        ("serial", "expected", "--"),
        ("float32", "guaranteed", "-"),
    ):
        terms = bound(rung, "dx", single, single, _ELEMENTS, kind=kind).terms
        dense = np.logspace(0, 6, 61)
        word = "never beyond" if kind == "guaranteed" else "expected"
        label = f"{word}: {rung}, {terms / unit:.0f} u T"
        axes.loglog(dense, unit + terms * dense, style, color="black", lw=1, label=label)
    axes.loglog(condition, [unit, unit], "-.", color="black", lw=1, label="rounded once: u = 2⁻²⁴")
    axes.set(
        xlim=(1, 1e6),
        ylim=(1e-10, 1e4),
        xlabel="condition number T/|exact|",
        ylabel="error of dx relative to the exact value",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="upper left", fontsize="small", ncols=2)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_overview(points: dict[str, list[list[float]]], path: Path) -> None:
    """Plot the largest error of each implementation by decade of the condition number."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams |= {"svg.hashsalt": "backnorm", "svg.fonttype": "none"}
    figure, axes = plt.subplots(figsize=(7.5, 3.6), layout="constrained")
    decades = np.arange(6)
    for name in reversed(_DRAWN):
        label, colour = _DRAWN[name]
        conditions, errors = np.array(points[name]).T
        decade = np.floor(np.log10(conditions)).astype(int)
        worst = [errors[decade == each].max() for each in decades]
        # Two implementations have nearly the same errors: dashes keep the lower line visible.
        style = "o--" if name == "torch" else "o-"
        axes.semilogy(decades, worst, style, color=colour, lw=2, label=label)
    axes.set_xticks(decades, [f"10$^{each}$ to 10$^{each + 1}$" for each in decades])
    axes.set(
        xlabel="how strongly the terms of an element cancel (condition number)",
        ylabel="relative error of dx, float32",
        title="Largest error of the input gradient",
    )
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> int:
    """Write the page and the pictures; with --check, say whether the page is current."""
    requested = options(__doc__, measure="first run every implementation, in five minutes")
    if requested.measure:
        RESULT.write_text(json.dumps(measured(), indent=1) + "\n", encoding="utf-8")
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    if not requested.check:
        draw(result["points"], PICTURE)
        draw_overview(result["points"], OVERVIEW)
    pages = {PAGE: page(PAGE.read_text(encoding="utf-8"), result)}
    return write_or_check(pages, check=requested.check)


if __name__ == "__main__":
    raise SystemExit(main())
