"""Write and read files of results, and make figures, texts and tables of them.

The file of either command (`operator`, `models`) is JSON: the "environment", the names of the
"columns", and the "rows", one per line. `read` returns the rows as a frame of pandas.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tabulate  # noqa: F401 (pandas would miss it only when a table is written)

from benchmarks.cells import (
    FLOOR,
    ITEMSIZE,
    LAYOUTS,
    OPERATIONS,
    OURS,
    OURS_IN_FLOAT32,
    OURS_REPRODUCIBLE,
    PASSES,
)

__all__ = ["DASH", "LABELS", "STYLE", "Result", "beside_best", "bytes_text", "column",
           "geometric_mean", "markdown", "mean_text", "milliseconds", "nbytes", "operator_lines",
           "operator_plot", "operator_table", "ratio_plot", "ratio_text", "ratio_to_floor",
           "ratios", "read", "result_of", "shape_text", "write"]  # fmt: skip

#: The style of figures in the documentation.
STYLE = Path(__file__).parent / "figures.mplstyle"

#: The text of a missing number.
DASH = "\N{EN DASH}"

#: The peers, and their names in tables.
LABELS = {"torch": "PyTorch", "cudnn": "cuDNN", "compile": "torch.compile", "jax": "JAX",
          "tensorflow": "TensorFlow", "onednn": "oneDNN", "numpy": "NumPy"}  # fmt: skip

# Significant digits of a number in a file: more than any measurement has.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Result:
    """The measurements of a run: facts of its environment, and a frame with a row for each cell."""

    environment: dict[str, Any]
    frame: pd.DataFrame


def result_of(environment: dict[str, Any], rows: Iterable[Mapping[str, Any]]) -> Result:
    """Return a result with these rows; missing numbers are NaN."""
    return Result(environment, pd.DataFrame(list(rows)))


def write(result: Result, path: Path) -> None:
    """Write a result, with six significant digits."""
    lines = [
        json.dumps([_value(value) for value in row], ensure_ascii=False)
        for row in result.frame.itertuples(index=False, name=None)
    ]
    head = {"environment": result.environment, "columns": list(result.frame)}
    text = json.dumps(head, indent=1)[:-2]
    path.write_text(f'{text},\n "rows": [\n' + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def read(path: Path) -> Result:
    """Return the result in a file."""
    file = json.loads(path.read_text(encoding="utf-8"))
    frame = pd.DataFrame(file["rows"], columns=file["columns"])
    # Early files have no notes.
    return Result(file["environment"], frame if "notes" in frame else frame.assign(notes=""))


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.{_DIGITS}g}")
    return value


def column(frame: pd.DataFrame, name: str) -> pd.Series:
    """Return a column of numbers; all NaN if the frame has no column of that name."""
    return frame[name].astype(float) if name in frame else pd.Series(np.nan, frame.index)


def nbytes(frame: pd.DataFrame) -> pd.Series:
    """Return the bytes of x in each cell."""
    sizes = frame["shape"].map(lambda text: math.prod(map(int, text.split(","))))
    return sizes * frame["dtype"].astype(str).map(ITEMSIZE)


def ratios(
    frame: pd.DataFrame, ours: str = OURS, peers: Sequence[str] = tuple(LABELS)
) -> pd.DataFrame:
    """Return the ratio of our time to that of the best of `peers`, in each cell.

    Each form of a peer is compared with the same form of ours. The best peer has the largest
    ratio.

    Returns
    -------
    pandas.DataFrame
        "ratio", and "peer", the column of the best peer; NaN and None if no peer has a time.
    """
    names = [f"{peer}.{form}" for peer in peers for form in ("out", "allocate")]
    quotients = pd.DataFrame({
        name: column(frame, f"{ours}.{name.split('.')[1]}") / column(frame, name)
        for name in names
    })  # fmt: skip
    ratio = quotients.max(axis=1)
    best = quotients.fillna(-1.0).idxmax(axis=1).astype(object)
    return pd.DataFrame({"ratio": ratio, "peer": best.where(ratio.notna(), None)})


def ratio_to_floor(frame: pd.DataFrame, ours: str = OURS) -> pd.Series:
    """Return the ratio of our time, in the form "out" if it has a time, to the floor's."""
    return _shown(frame, ours) / column(frame, f"{FLOOR}.out")


def _shown(frame: pd.DataFrame, ours: str) -> pd.Series:
    return column(frame, f"{ours}.out").fillna(column(frame, f"{ours}.allocate"))


def geometric_mean(values: pd.Series) -> float:
    """Return the geometric mean, ignoring NaN; NaN if there is no other value."""
    return float(np.exp(np.log(values.dropna().astype(float)).mean()))


def beside_best(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the texts of our time and of the best peer's, in the same form, and the ratio.

    Returns
    -------
    pandas.DataFrame
        "ours" and "time", milliseconds; "peer", its name; "form"; and "ratio", marked where the
        peer is faster.
    """
    found = ratios(frame)
    lines = []
    for (_, row), ratio, peer in zip(frame.iterrows(), found.ratio, found.peer, strict=True):
        if peer is None:
            lines.append([DASH] * 5)
            continue
        name, form = peer.split(".")
        times = milliseconds(row[f"{OURS}.{form}"]), milliseconds(row[peer])
        lines.append([*times, LABELS[name], form, ratio_text(ratio, marked=True)])
    return pd.DataFrame(lines, frame.index, ["ours", "time", "peer", "form", "ratio"])


def operator_table(result: Result) -> pd.DataFrame:
    """Return a row for each cell: our time, the best peer's in the same form, and the floor's."""
    frame = result.frame
    best = beside_best(frame)
    speed = frame.op.map(PASSES) * nbytes(frame) / _shown(frame, OURS) / 1e9
    table = frame[["suite", "op", "shape", "layout", "dtype"]].assign(
        **{
            "ms": best.ours,
            "best peer": best.peer + " (" + best.form + ")",
            "its ms": best.time,
            "ratio": best.ratio,
            "floor": ratio_to_floor(frame).map(ratio_text),
            "GB/s": speed.map(lambda value: f"{value:.3g}"),
        }
    )
    others = [name for name in frame if name.endswith(".whole") and not name.startswith(OURS)]
    if others:
        whole = column(frame, f"{OURS}.allocate.whole") / frame[others].min(axis=1)
        table["whole call"] = whole.map(lambda ratio: ratio_text(ratio, marked=True))
    return table


def operator_lines(result: Result) -> list[str]:
    """Return lines with the means, and with the reasons why contestants have no time."""
    frame, lines = result.frame, []
    for ours in (OURS, OURS_IN_FLOAT32):
        found = ratios(frame, ours).ratio.dropna()
        if len(found):
            floor = ratio_text(geometric_mean(ratio_to_floor(frame, ours)))
            lines.append(
                f"{ours}: {mean_text(found)} of the best peer's time; {floor} of the floor's"
            )
    cost = column(frame, f"{OURS_REPRODUCIBLE}.out") / column(frame, f"{OURS}.out")
    if cost.notna().any():
        lines.append(f"{OURS_REPRODUCIBLE}: {mean_text(cost.dropna())} of {OURS}'s time")
    notes = frame.notes[frame.notes != ""].str.split("; ").explode()
    # Lines are counted by contestant, form, status and the first part of the detail.
    counts = notes.str.split(": ").str[:2].str.join(": ").value_counts()
    lines += [f"{note} ({count} of {len(frame)} cells)" for note, count in counts.items()]
    if result.environment.get("device"):
        lines.append(f"copying: {result.environment['device']['bandwidth'] / 1e9:.0f} GB/s")
    return lines


def mean_text(found: pd.Series) -> str:
    """Return a mean of ratios, and how many are above 1."""
    slower = f"slower in {(found > 1).sum()} of {len(found)}, {found.max():.2f} in the worst"
    return f"{ratio_text(geometric_mean(found))} in the geometric mean ({slower})"


def operator_plot(result: Result, path: Path) -> None:
    """Plot the ratio of our time to the best peer's by the size of x, for every cell."""
    frame = result.frame
    sizes, found = nbytes(frame), ratios(frame).ratio
    with ratio_plot(path, (5.5, 4.2), "y") as (axes,):
        for op, layout in itertools.product(OPERATIONS, LAYOUTS):
            chosen = (frame.op == op) & (frame.layout == layout)
            colour = f"C{OPERATIONS.index(op)}"
            style = {"marker": "o"} if layout == "NCX" else {"marker": "^", "mfc": "none"}
            axes.plot(sizes[chosen], found[chosen], ls="", ms=4, color=colour,
                      label=f"{op}, {layout}", **style)  # fmt: skip
        axes.set_xscale("log", base=64)
        axes.xaxis.set_major_formatter(lambda size, _: bytes_text(size))
        axes.xaxis.minorticks_off()
        axes.set_xlabel("bytes of x")
        axes.set_ylabel("our time / best peer's")


@contextmanager
def ratio_plot(
    path: Path, size: tuple[float, float], direction: str, rows: int = 1
) -> Iterator[Sequence[Any]]:
    """Yield axes of plots of ratios along "x" or "y", with a line at 1; then write an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.style.context(STYLE):
        sharing = {"sharex": True} if direction == "x" else {}
        figure, every = plt.subplots(rows, figsize=size, squeeze=False, **sharing)
        yield every[:, 0]
        marks: dict[str, Any] = {}
        for axes in every[:, 0]:
            if direction == "y":
                axes.set_yscale("log")
            axis = getattr(axes, f"{direction}axis")
            line = axes.axhline if direction == "y" else axes.axvline
            line(1.0, color=axis.label.get_color())
            axis.set_major_formatter(lambda ratio, _: f"{ratio:g}")
            # Labels of all minor ticks of a logarithmic axis would overlap.
            axis.set_minor_formatter(lambda ratio, _: f"{ratio:g}" * (f"{ratio:g}"[-1] in "235"))
            handles, labels = axes.get_legend_handles_labels()
            marks |= dict(zip(labels, handles, strict=True))
        figure.legend(marks.values(), marks, loc="outside upper center", ncols=3)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def markdown(table: pd.DataFrame) -> str:
    """Return a table of texts as Markdown; a pipe in a text is escaped."""
    texts = table.map(lambda text: " ".join(str(text).replace("|", "\\|").split()))
    written: str = texts.to_markdown(index=False, tablefmt="github", disable_numparse=True)
    return f"{written}\n"


def shape_text(shape: str) -> str:
    """Return a shape with multiplication signs."""
    return shape.replace(",", "\N{MULTIPLICATION SIGN}")


def milliseconds(seconds: float) -> str:
    """Return milliseconds in three significant digits; a dash for NaN."""
    if math.isnan(seconds):
        return DASH
    value = seconds * 1e3
    return f"{value:.{min(max(2 - math.floor(math.log10(value)), 0), 5)}f}"


def ratio_text(ratio: float, *, marked: bool = False) -> str:
    """Return a ratio with two decimals, or a dash for NaN; `marked`: in bold if above 1."""
    if math.isnan(ratio):
        return DASH
    return f"**{ratio:.2f}** (slower)" if marked and ratio > 1 else f"{ratio:.2f}"


def bytes_text(size: float) -> str:
    """Return a size in the largest binary unit that it fills."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
