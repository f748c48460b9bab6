"""Plots against the size of x: speed under the measured roof, and time per byte of the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.model import FLOOR, OURS, PASSES, Form, Outcome, Row, geometric_mean
from benchmarks.report.canvas import COLOURS, Plot, mark, new_figure, quiet, show_legend
from benchmarks.report.figures import distinct, peer_columns, preferred, sweep
from benchmarks.report.numbers import bytes_text
from benchmarks.report.words import label

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

__all__ = ["roofline_plot", "sweep_plot"]

# Points.
_WIDTH = 700
_PANEL = 205
_MARGIN = 30

_LAYOUTS = ("NCX", "NXC")

# Bytes of x from which speed says something about memory rather than about calls.
_SMALLEST = 64 * 1024


def roofline_plot(dtype: str, rows: Sequence[Row], caches: Sequence[int], roof: str) -> Plot | None:
    """Draw GB/s against the size of x at one type, a panel per operation and layout.

    Must be called in the context `look`. `caches` are sizes in bytes to mark, `roof` says what the
    floor is. None if there is nothing to draw.
    """
    rows = [
        row
        for row in distinct(rows)
        if row.cell.dtype == dtype and row.cell.nbytes >= _SMALLEST and preferred(row, OURS)
    ]
    if not rows:
        return None
    passes = ", ".join(f"{op} {count}" for op, count in PASSES.items())
    return _panels(
        rows,
        _roofline_panel,
        caches,
        name=f"roofline-{dtype}",
        title=f"Speed against size, {dtype}",
        caption=(
            f"{roof} (counted are: {passes}). Arrays below "
            f"{bytes_text(_SMALLEST)}, where the cost of a call is what counts, are in the tables."
        ),
        y_label="GB/s",
    )


def sweep_plot(rows: Sequence[Row], caches: Sequence[int]) -> Plot | None:
    """Draw time per byte against the size of x for the size sweep; None if there is no sweep.

    Must be called in the context `look`. `caches` are sizes in bytes to mark.
    """
    rows = [row for row in sweep(rows) if preferred(row, OURS)]
    if not rows:
        return None
    types = ", ".join(dict.fromkeys(row.cell.dtype for row in rows))
    return _panels(
        rows,
        _sweep_panel,
        caches,
        name="sweep",
        title=f"Time per byte of x, from small to large ({types})",
        caption=(
            "Lower is better. On the left the cost of a call counts, on the right the speed of "
            "memory. Each contestant with the output given where it can take one."
        ),
        y_label="ns per byte of x (log scale)",
    )


def _panels(
    rows: Sequence[Row],
    draw: Callable[[Axes, Sequence[Row]], None],
    caches: Sequence[int],
    *,
    name: str,
    title: str,
    caption: str,
    y_label: str,
) -> Plot:
    ops = [op for op in PASSES if any(row.cell.op == op for row in rows)]
    layouts = [layout for layout in _LAYOUTS if any(row.cell.layout == layout for row in rows)]
    # The sweep has one operation; its curves deserve the height that others give to three.
    height = _PANEL * (1.25 if len(ops) == 1 else 1)
    figure, axes = new_figure(
        _WIDTH, height * len(ops) + _MARGIN, len(ops), len(layouts), sharex=True, sharey="row"
    )
    for line, op in zip(axes, ops, strict=True):
        for axis, layout in zip(line, layouts, strict=True):
            chosen = [row for row in rows if (row.cell.op, row.cell.layout) == (op, layout)]
            axis.set_title(f"{op}, {layout}")
            axis.set_xscale("log", base=2)
            draw(axis, chosen)
            _size_axis(axis, rows)
            _mark_caches(axis, caches)
            quiet(axis)
        line[0].set_ylabel(y_label)
    for axis in axes[-1]:
        axis.set_xlabel("size of x")
    show_legend(figure, _handles(rows))
    alternative = (
        f"{title}: panels for {', '.join(ops)} in {', '.join(layouts)}, {len(rows)} cells from "
        f"{bytes_text(min(row.cell.nbytes for row in rows))} to "
        f"{bytes_text(max(row.cell.nbytes for row in rows))}. The tables hold the values."
    )
    return Plot(name, title, caption, alternative, figure)


def _roofline_panel(axis: Axes, rows: Sequence[Row]) -> None:
    if not rows:
        return
    roof = _roof(rows)
    if roof:
        sizes, speeds = zip(*roof, strict=True)
        how = mark(FLOOR)
        # One point makes no line.
        marker = how.marker if len(roof) == 1 else ""
        axis.plot(
            sizes, speeds, color=how.colour, marker=marker, markersize=14, linewidth=1.4, zorder=2
        )
        axis.fill_between(sizes, speeds, 0, color=COLOURS["grid"][0], alpha=0.45, linewidth=0)
    for contestant in _contestants(rows):
        if contestant != FLOOR:
            points = _points(rows, contestant, Row.gigabytes_per_second)
            _draw_points(axis, contestant, points)
    axis.set_ylim(bottom=0, auto=True)


def _roof(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Return the floor's speed by size: the mean of the cells in each octave."""
    octaves: dict[int, list[tuple[float, float]]] = {}
    for size, speed in _points(rows, FLOOR, Row.gigabytes_per_second):
        octaves.setdefault(round(math.log2(size)), []).append((size, speed))
    return [
        (geometric_mean(size for size, _ in points), geometric_mean(speed for _, speed in points))
        for _, points in sorted(octaves.items())
    ]


def _sweep_panel(axis: Axes, rows: Sequence[Row]) -> None:
    def per_byte(row: Row, outcome: Outcome) -> float | None:
        return outcome.timing.median * 1e9 / row.cell.nbytes if outcome.timing else None

    axis.set_yscale("log")
    for contestant in _contestants(rows):
        points = sorted(_points(rows, contestant, per_byte))
        how = mark(contestant)
        ours = contestant == OURS
        axis.plot(
            [size for size, _ in points],
            [value for _, value in points],
            color=how.colour,
            marker="" if contestant == FLOOR else how.marker,
            markersize=4.5 if ours else 3.2,
            markeredgecolor=COLOURS["paper"][0],
            markeredgewidth=0.5,
            linewidth=2.0 if ours else 1.1,
            linestyle=(0, (2, 1.5)) if contestant == FLOOR else "-",
            zorder=5 if ours else 3,
        )


def _draw_points(axis: Axes, contestant: str, points: Sequence[tuple[float, float]]) -> None:
    how, ours = mark(contestant), contestant == OURS
    axis.plot(
        [size for size, _ in points],
        [value for _, value in points],
        linestyle="",
        color=how.colour,
        marker=how.marker,
        markersize=5.5 if ours else 3.8,
        markerfacecolor=how.colour if ours else "none",
        markeredgecolor=COLOURS["paper"][0] if ours else how.colour,
        markeredgewidth=0.5 if ours else 0.9,
        zorder=5 if ours else 3,
    )


def _points(
    rows: Sequence[Row], contestant: str, value: Callable[[Row, Outcome], float | None]
) -> list[tuple[float, float]]:
    return [
        (row.cell.nbytes, y)
        for row in rows
        if (outcome := preferred(row, contestant)) and (y := value(row, outcome)) is not None
    ]


def _contestants(rows: Sequence[Row]) -> list[str]:
    columns: list[tuple[str, Form]] = [(OURS, "out"), *peer_columns(rows), (FLOOR, "out")]
    return [
        name
        for name in dict.fromkeys(name for name, _ in columns)
        if any(preferred(row, name) for row in rows)
    ]


def _size_axis(axis: Axes, rows: Sequence[Row]) -> None:
    low = math.floor(math.log2(min(row.cell.nbytes for row in rows)))
    high = math.ceil(math.log2(max(row.cell.nbytes for row in rows)))
    step = max(1, math.ceil((high - low) / 7))
    ticks = [2**exponent for exponent in range(low, high + 1, step)]
    axis.set_xticks(ticks, [bytes_text(tick) for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlim(2 ** (low - 0.3), 2 ** (high + 0.3))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda *_: "")


def _mark_caches(axis: Axes, caches: Sequence[int]) -> None:
    low, high = axis.get_xlim()
    for size in caches:
        if low < size < high:
            axis.axvline(size, color=COLOURS["muted"][0], linewidth=0.7, linestyle=(0, (1, 2)))
            axis.annotate(
                f"cache {bytes_text(size)}",
                (size, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2, -7),
                textcoords="offset points",
                fontsize=6.5,
                color=COLOURS["muted"][0],
            )


def _handles(rows: Sequence[Row]) -> list[Artist]:
    from matplotlib.lines import Line2D

    handles: list[Artist] = []
    for contestant in _contestants(rows):
        how = mark(contestant)
        line = contestant == FLOOR
        handles.append(
            Line2D(
                [],
                [],
                color=how.colour,
                linestyle="-" if line else "",
                marker="" if line else how.marker,
                label="floor (measured)" if line else label(contestant),
            )
        )
    return handles
