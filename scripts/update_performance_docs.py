"""Write the tables and plots of README.md and docs/performance.md from docs/bench/result.json.

Text between the markers is replaced, all other text stays. With --check: say what is not current,
and write nothing.

Usage, from the root of the repository: python -m scripts.update_performance_docs [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model import OURS, Result, Row, geometric_mean
from benchmarks.report import read_result
from benchmarks.report.figures import (
    SWEEP,
    best_peer,
    groups,
    is_large,
    losing,
    summaries,
)
from benchmarks.report.markdown import cell_list, summary_table, table
from benchmarks.report.numbers import DASH, bytes_text, milliseconds, ratio_text
from benchmarks.report.plots import draw
from benchmarks.report.words import label, shape_text

ROOT = Path(__file__).resolve().parents[1]
RESULT = Path("docs/bench/result.json")

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"

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
    (1, "NXC"): "oneDNN computes in float32, we in float64",
    (2, "NCX"): "three passes over memory where others make five",
    (2, "NXC"): "memory limits the fastest peers as it limits us",
}


def pages(result: Result, root: Path) -> dict[Path, str]:
    """Return the text of every file that follows from `result`, by its path."""
    plots = {plot.name: plot for plot in draw(result) if plot.name in _PLOTS}
    folder = RESULT.parent
    found = {root / folder / f"{name}.svg": plot.standalone() for name, plot in plots.items()}
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
        found[path] = _between_markers(path, "\n".join([part, *shown]))
    return found


def stale(result: Result, root: Path) -> list[Path]:
    """Return the files that are not what `result` gives."""
    return [path for path, text in pages(result, root).items() if not _is_current(path, text)]


def _readme(result: Result) -> str:
    rows = _rows(result)
    kinds = _kinds(rows, result.caches)
    means: dict[str, list[str]] = {}
    for summary in summaries(result):
        text = f"{ratio_text(summary.mean)} in {summary.dtype}"
        means.setdefault(summary.op, []).append(text)
    lost = len(losing(rows))
    return "\n".join(
        [
            f"{_where(result)} `batch_norm_backward`, {_DTYPE}: our time over that of the fastest "
            "of PyTorch, TensorFlow, JAX, oneDNN and NumPy in the same cell; below 1 we are "
            "faster. For every kind of array the geometric mean, and the cells where we do best "
            "and worst; sizes are those of a core's cache and of the one that all share.\n",
            table(
                ("size of x", "layout", "cells", "mean", "best cell", "worst cell", "why"),
                (_kind(kind, cells, result.caches) for kind, cells in kinds.items()),
            ),
            f"Of {len(rows)} cells a peer is faster in {lost}. Means of all operations and types: "
            + "; ".join(f"{op} {', '.join(texts)}" for op, texts in means.items())
            + ".\n",
        ]
    )


def _kinds(rows: Sequence[Row], caches: Sequence[int]) -> dict[tuple[int, str], list[Row]]:
    """Return the compared cells by their key in `_WHY`, of each the best first."""
    kinds: dict[tuple[int, str], list[Row]] = {kind: [] for kind in _WHY}
    for row in sorted(rows, key=lambda row: row.ratio() or 0):
        if row.ratio() is not None:
            larger_than = sum(is_large(row.cell, cache) for cache in caches)
            kinds[larger_than, row.cell.layout].append(row)
    return {kind: cells for kind, cells in kinds.items() if cells}


def _kind(kind: tuple[int, str], rows: Sequence[Row], caches: Sequence[int]) -> Sequence[str]:
    larger_than, layout = kind
    sizes = [f"up to {bytes_text(size)}" for size in caches] + ["larger"]
    mean = ratio_text(geometric_mean(r for row in rows if (r := row.ratio())))
    cells = (_best_or_worst(row) for row in (rows[0], rows[-1]))
    return sizes[larger_than], layout, str(len(rows)), f"**{mean}**", *cells, _WHY[kind]


def _best_or_worst(row: Row) -> str:
    ours, theirs, _ = _columns(row)
    return f"{ratio_text(row.ratio())}: {shape_text(row.cell)}, {ours} ms, {theirs} ms"


def _performance(result: Result) -> str:
    return "\n".join(
        [
            f"{_where(result)} All numbers: [bench/result.json](bench/result.json).\n",
            "## Means\n",
            summary_table(summaries(result)),
            f"## {_OP}, {_DTYPE}\n",
            _table([row for row in _rows(result) if row.cell.suite != SWEEP]),
            "## Losing cells\n",
            cell_list(losing(result.rows), "No peer is faster anywhere."),
            "## Plots\n",
        ]
    )


def _rows(result: Result) -> list[Row]:
    return groups(result.rows).get((_OP, _DTYPE), [])


def _where(result: Result) -> str:
    environment = result.environment
    versions = ", ".join(f"{name} {text}" for name, text in environment.versions.items())
    threads = f"{environment.threads} thread{'s' if environment.threads > 1 else ''}"
    return f"{environment.cpu}, {threads}, {environment.date[:10]}; {versions}."


def _table(rows: Sequence[Row]) -> str:
    """Return a line per shape, both layouts side by side, and their geometric means."""
    lines: dict[str, dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(shape_text(row.cell), {})[row.cell.layout] = row
    body = [
        [shape, *_columns(layouts.get("NCX")), *_columns(layouts.get("NXC"))]
        for shape, layouts in lines.items()
    ]
    means = [
        ratio_text(
            geometric_mean(r for row in rows if row.cell.layout == layout and (r := row.ratio()))
        )
        for layout in ("NCX", "NXC")
    ]
    body.append(["geometric mean", "", "", f"**{means[0]}**", "", "", f"**{means[1]}**"])
    columns = ("best peer", "ratio")
    return table(["shape", "NCX, ms", *columns, "NXC, ms", *columns], body)


def _columns(row: Row | None) -> tuple[str, str, str]:
    peer = best_peer(row) if row else None
    if row is None or peer is None:
        return DASH, DASH, DASH
    ratio = row.ratio()
    text = ratio_text(ratio)
    return (
        milliseconds(row.seconds(OURS, peer.form)),
        f"{label(peer.contestant)} {milliseconds(row.seconds(peer.contestant, peer.form))}",
        f"**{text}** (slower)" if ratio is not None and ratio > 1 else text,
    )


def _between_markers(path: Path, part: str) -> str:
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{path}: needs the lines {BEGIN} and {END}, once and in this order")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{part.rstrip()}\n{END}{rest.split(END)[1]}"


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
