"""Write the tables and plots of README.md and docs/performance.md from the results in docs/bench.

Those are result.json, models.json of whole models, models-of-*.json of the same on other machines,
and models-frameworks-*.json of models of other frameworks. By layout all results of the CPU are
shown that lie beside result.json, those of other machines. Text between the markers is replaced,
all other text stays. With --check: say what is not current, and write nothing.

Usage, from the root of the repository: python -m scripts.update_performance_docs [--check]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from benchmarks.model import OURS, Result, Row
from benchmarks.models.page import frameworks_page, models_page
from benchmarks.report import read_result
from benchmarks.report.figures import SWEEP, cells, losing, mean, summary
from benchmarks.report.layouts import layout_cells, layout_tables, limits_table
from benchmarks.report.plots import draw
from benchmarks.report.result_file import SCHEMA
from benchmarks.report.tables import cell_table, markdown, summary_table
from benchmarks.report.words import (
    CONDITION_WORDS,
    DASH,
    bytes_text,
    caches_text,
    label,
    milliseconds,
    ratio_text,
    shape_text,
    versions_text,
    where_text,
)

ROOT = Path(__file__).resolve().parents[1]
RESULT, MODELS = Path("docs/bench/result.json"), Path("docs/bench/models.json")
OTHER_MODELS = "models-of-*.json"
# Of other frameworks than PyTorch, a file for each number of threads.
FRAMEWORKS = "models-frameworks-*.json"

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
BEGIN_MODELS, END_MODELS = "<!-- models:begin -->", "<!-- models:end -->"
BEGIN_FRAMEWORKS, END_FRAMEWORKS = "<!-- frameworks:begin -->", "<!-- frameworks:end -->"
BEGIN_MACHINES, END_MACHINES = "<!-- machines:begin -->", "<!-- machines:end -->"

# Said before the table of limits.
_BELOW = (
    "Behind a count stands in how many of those cells the limit is less than the floor's time.\n"
)

# What the tables show: the operator that the project is about, and the type that most train in.
_OP, _DTYPE = "backward", "float32"
# The README's is the one that can be read at its size.
_README_PLOT = SWEEP
_PLOTS = (f"ratio-{_OP}-{_DTYPE}", f"roofline-{_DTYPE}", SWEEP)

# Why cells are as they are, by the number of caches that x is larger than (a core's, the shared
# one) and by layout. Which cells are shown follows from their ratios alone.
_CALL = "a call from Python costs more than the work; oneDNN's primitive is made beforehand"
_WHY = {
    (0, "NCX"): _CALL,
    (0, "NXC"): _CALL,
    (1, "NCX"): "a group of channels is summed and written while it is cached",
    (1, "NXC"): "oneDNN computes in float32, and its dx goes past the caches",
    (2, "NCX"): "three passes over memory where others make five",
    (2, "NXC"): "memory limits the fastest peers as it limits us",
}


def pages(result: Result, root: Path) -> dict[Path, str]:
    """Return the text of every file that follows from `result`, by its path."""
    plots = {plot.name: plot for plot in draw(result) if plot.name in _PLOTS}
    folder = RESULT.parent
    found = {root / folder / f"{name}.svg": plot.svg() for name, plot in plots.items()}
    for name, part, images in (
        ("README.md", _readme(result), (_README_PLOT,)),
        ("docs/performance.md", _performance(result), _PLOTS),
    ):
        path = root / name
        # From the page to the plots: relative, so that it works in any checkout and on any site.
        to_plots = folder if path.parent == root else folder.relative_to(path.parent.name)
        shown = [
            f"![{plots[image].alternative}]({(to_plots / image).as_posix()}.svg)\n"
            for image in images
            if image in plots
        ]
        text = path.read_text(encoding="utf-8")
        # The README has one machine.
        of_models = [root / MODELS, *sorted((root / folder).glob(OTHER_MODELS))]
        if (root / MODELS).exists():
            shown_models = of_models[:1] if path.parent == root else of_models
            text = _between(path, text, models_page(shown_models), BEGIN_MODELS, END_MODELS)
        found[path] = _between(path, text, "\n".join([part, *shown]), BEGIN, END)
    path = root / "docs/performance.md"
    paths = sorted((root / folder).glob(FRAMEWORKS))
    if paths:
        part, between = frameworks_page(paths), (BEGIN_FRAMEWORKS, END_FRAMEWORKS)
        found[path] = _between(path, found[path], part, *between)
    part = _machines(_results(result, root / folder))
    found[path] = _between(path, found[path], part, BEGIN_MACHINES, END_MACHINES)
    return found


def stale(result: Result, root: Path) -> list[Path]:
    """Return the files that are not what `result` gives."""
    return [path for path, text in pages(result, root).items() if not _is_current(path, text)]


def _readme(result: Result) -> str:
    frame = cells(result)
    chosen = _chosen(frame)
    means = summary(frame)["mean"]
    texts = (
        f"{op} {', '.join(f'{ratio_text(each)} in {dtype}' for (_, dtype), each in found.items())}"
        for op, found in means.groupby(level="op", observed=True)
    )
    return "\n".join(
        [
            f"{_where(result)} `batch_norm_backward`, {_DTYPE}: our time over that of the fastest "
            "of PyTorch, TensorFlow, JAX, oneDNN and NumPy in the same cell; below 1 we are "
            "faster. For every kind of array the geometric mean, and the cells where we do best "
            "and worst; sizes are those of a core's cache and of the one that all share.\n",
            markdown(_kinds(chosen[chosen.ratio.notna()], result.caches)),
            f"Of {len(chosen)} cells a peer is faster in {chosen.lost.sum()}. "
            f"Means of all operations and types: {'; '.join(texts)}.\n",
        ]
    )


def _chosen(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame.op == _OP) & (frame.dtype == _DTYPE)]


def _kinds(compared: pd.DataFrame, caches: Sequence[int]) -> pd.DataFrame:
    """Return a line for every key of `_WHY` that some of the compared cells are of."""
    sizes = [f"up to {bytes_text(size)}" for size in caches] + ["larger"]
    larger_than = sum((compared.nbytes > size).astype(int) for size in caches)
    lines = [
        (
            sizes[kind[0]],
            kind[1],
            str(len(found)),
            f"**{ratio_text(mean(found.ratio))}**",
            *(_best_or_worst(found.row[at]) for at in (found.ratio.idxmin(), found.ratio.idxmax())),
            _WHY[kind],
        )
        for kind, found in compared.groupby([larger_than, compared.layout])
    ]
    columns = ["size of x", "layout", "cells", "mean", "best cell", "worst cell", "why"]
    return pd.DataFrame(lines, columns=columns, dtype=str)


def _best_or_worst(row: Row) -> str:
    ours, theirs, _ = _columns(row)
    return f"{ratio_text(row.ratio())}: {shape_text(row.cell)}, {ours} ms, {theirs} ms"


def _performance(result: Result) -> str:
    frame = cells(result)
    chosen, lost = _chosen(frame), losing(frame)
    return "\n".join(
        [
            f"{_where(result)} All numbers: [bench/result.json](bench/result.json).\n",
            "## Means\n",
            markdown(summary_table(summary(frame))),
            f"## {_OP}, {_DTYPE}\n",
            markdown(_table(chosen[chosen.suite != SWEEP])),
            "## Losing cells\n",
            markdown(cell_table(lost)) if len(lost) else "No peer is faster anywhere.\n",
            "## Plots\n",
        ]
    )


def _results(result: Result, folder: Path) -> dict[str, Result]:
    """Return `result` and those of the CPU that lie beside it, the newest first, by their names."""
    beside = (path for path in sorted(folder.glob("*.json")) if path.name != RESULT.name)
    others = {path.name: read_result(path) for path in beside if _is_result(path)}
    newest = sorted(others, key=lambda name: others[name].environment.date, reverse=True)
    chosen = {RESULT.name: result} | {name: others[name] for name in newest}
    return {name: found for name, found in chosen.items() if found.device == "cpu"}


def _is_result(path: Path) -> bool:
    return json.loads(path.read_text(encoding="utf-8")).get("schema") == SCHEMA


def _machines(results: Mapping[str, Result]) -> str:
    """Return for each machine its means by layout, and how far all are from the limits."""
    parts, frames = [], {}
    for name, result in results.items():
        where, frame = where_text(result.environment), layout_cells(result)
        # Two results may be of one machine and one day.
        heading = f"{where}, {name}" if where in frames else where
        frames[heading] = frame
        parts += [
            f"### {heading}\n",
            f"{caches_text(result.environment)}; {CONDITION_WORDS[result.condition]}; "
            f"{versions_text(result.environment)}. "
            f"All {len(cells(result))} cells: [bench/{name}](bench/{name}).\n",
            *map(markdown, layout_tables(frame)),
        ]
    parts += ["### Cells above the limits\n", _BELOW, markdown(limits_table(frames))]
    return "\n".join(parts)


def _where(result: Result) -> str:
    return f"{where_text(result.environment)}; {versions_text(result.environment)}."


def _table(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a line per shape, both layouts side by side, and their geometric means."""
    sides = []
    for layout, found in frame.groupby("layout"):
        lines = [*map(_columns, found.row), ("", "", f"**{ratio_text(mean(found.ratio))}**")]
        columns = [f"{layout}, ms", f"{layout}, best peer", f"{layout}, ratio"]
        sides.append(pd.DataFrame(lines, [*found["shape"], "geometric mean"], columns, dtype=str))
    shapes = [*frame["shape"].unique(), "geometric mean"]
    sides = [side.reindex(shapes, fill_value=DASH) for side in sides]
    return pd.concat(sides, axis=1).rename_axis("shape").reset_index()


def _columns(row: Row) -> tuple[str, str, str]:
    peer = row.best_peer()
    if peer is None:
        return DASH, DASH, DASH
    ratio = row.ratio()
    text = ratio_text(ratio)
    return (
        milliseconds(row.seconds(OURS, peer.form)),
        f"{label(peer.contestant)} {milliseconds(row.seconds(peer.contestant, peer.form))}",
        f"**{text}** (slower)" if ratio is not None and ratio > 1 else text,
    )


def _between(path: Path, text: str, part: str, begin: str, end: str) -> str:
    """Return the text of a page with `part` between two markers."""
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise SystemExit(f"{path}: needs the lines {begin} and {end}, once and in this order")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{part.rstrip()}\n{end}{rest.split(end)[1]}"


def _is_current(path: Path, text: str) -> bool:
    if not path.exists():
        return False
    there = path.read_text(encoding="utf-8")
    # Another release of matplotlib draws other paths from the same numbers.
    return there == text or (path.suffix == ".svg" and _drawn_by(there) != _drawn_by(text))


def _drawn_by(svg: str) -> str:
    found = re.search(r"Matplotlib v[\d.]+", svg)
    return found[0] if found else ""


def main() -> int:
    """Write the files, or with --check say which are not current."""
    result = read_result(ROOT / RESULT)
    if "--check" in sys.argv[1:]:
        old = stale(result, ROOT)
        for path in old:
            print(
                f"{path.relative_to(ROOT)} is not current: run "
                "python -m scripts.update_performance_docs",
                file=sys.stderr,
            )
        return 1 if old else 0
    for path, text in pages(result, ROOT).items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
