"""Curves over the size of x: speed under the measured roof, and time per byte of the sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.model import FLOOR, OURS, PASSES, geometric_mean
from benchmarks.report.canvas import COLOURS, Plot, mark, new_figure, quiet, show_legend
from benchmarks.report.figures import PROBLEM, SWEEP, in_order
from benchmarks.report.words import bytes_text, label

__all__ = ["roofline_plot", "sweep_plot"]

# Points.
_WIDTH = 700
_PANEL = 205
_MARGIN = 30

_LAYOUTS = ("NCX", "NXC")

# Bytes of x from which speed says something about memory rather than about calls.
_SMALLEST = 64 * 1024


def roofline_plot(dtype: str, times: pd.DataFrame, caches: Sequence[int], roof: str) -> Plot | None:
    """Draw GB/s against the size of x at one type, a panel per operation and layout.

    Must be called in the context `look`. `times` are those of `preferred`, `caches` sizes in bytes
    to mark, `roof` says what the floor is. None if there is nothing to draw.
    """
    chosen = times[(times.dtype == dtype) & (times.nbytes >= _SMALLEST)]
    passes = ", ".join(f"{op} {count}" for op, count in PASSES.items())
    return _panels(
        chosen.assign(value=chosen.op.map(PASSES) * chosen.nbytes / chosen["median"] / 1e9),
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


def sweep_plot(times: pd.DataFrame, caches: Sequence[int]) -> Plot | None:
    """Draw time per byte against the size of x for the size sweep; None if there is no sweep.

    Must be called in the context `look`. `times` are those of `preferred`, of the sweep alone,
    `caches` sizes in bytes to mark.
    """
    return _panels(
        times.assign(value=times["median"] * 1e9 / times.nbytes),
        _sweep_panel,
        caches,
        name=SWEEP,
        title=f"Time per byte of x, from small to large ({', '.join(times.dtype.unique())})",
        caption=(
            "Lower is better. On the left the cost of a call counts, on the right the speed of "
            "memory. Each contestant with the output given where it can take one."
        ),
        y_label="ns per byte of x (log scale)",
    )


def _panels(
    points: pd.DataFrame,
    draw: Callable[[Axes, str, pd.DataFrame], None],
    caches: Sequence[int],
    *,
    name: str,
    title: str,
    caption: str,
    y_label: str,
) -> Plot | None:
    """Draw the cells in which ours was timed; None if there are none."""
    ours = points[points.contestant == OURS]
    if ours.empty:
        return None
    points = points.merge(ours[PROBLEM], on=PROBLEM)
    ops = [op for op in PASSES if op in {*points.op}]
    layouts = [layout for layout in _LAYOUTS if layout in {*points.layout}]
    # The sweep has one operation; its curves deserve the height that others give to three.
    height = _PANEL * (1.25 if len(ops) == 1 else 1)
    figure, axes = new_figure(
        _WIDTH, height * len(ops) + _MARGIN, len(ops), len(layouts), sharex=True, sharey="row"
    )
    for line, op in zip(axes, ops, strict=True):
        for axis, layout in zip(line, layouts, strict=True):
            axis.set_title(f"{op}, {layout}")
            axis.set_xscale("log", base=2)
            chosen = points[(points.op == op) & (points.layout == layout)]
            for contestant in in_order(chosen.contestant):
                draw(axis, contestant, chosen[chosen.contestant == contestant])
            _size_axis(axis, points)
            _mark_caches(axis, caches)
            quiet(axis)
        line[0].set_ylabel(y_label)
    for axis in axes[-1]:
        axis.set_xlabel("size of x")
    show_legend(figure, [_handle(contestant) for contestant in in_order(points.contestant)])
    alternative = (
        f"{title}: panels for {', '.join(ops)} in {', '.join(layouts)}, {len(ours)} cells from "
        f"{bytes_text(ours.nbytes.min())} to {bytes_text(ours.nbytes.max())}. The tables hold the "
        "values."
    )
    return Plot(name, title, caption, alternative, figure)


def _roofline_panel(axis: Axes, contestant: str, points: pd.DataFrame) -> None:
    how, ours = mark(contestant), contestant == OURS
    if contestant == FLOOR:
        roof = _roof(points)
        # One point makes no line.
        marker = how.marker if len(roof) == 1 else ""
        axis.plot(
            roof.nbytes,
            roof.value,
            color=how.colour,
            marker=marker,
            markersize=14,
            linewidth=1.4,
            zorder=2,
        )
        axis.fill_between(
            roof.nbytes, roof.value, 0, color=COLOURS["grid"], alpha=0.45, linewidth=0
        )
    else:
        axis.plot(
            points.nbytes,
            points.value,
            linestyle="",
            color=how.colour,
            marker=how.marker,
            markersize=5.5 if ours else 3.8,
            markerfacecolor=how.colour if ours else "none",
            markeredgecolor=COLOURS["paper"] if ours else how.colour,
            markeredgewidth=0.5 if ours else 0.9,
            zorder=5 if ours else 3,
        )
    axis.set_ylim(bottom=0, auto=True)


def _roof(points: pd.DataFrame) -> pd.DataFrame:
    """Return the floor's speed by size: the mean of the cells in each octave."""
    octaves = np.log2(points.nbytes).round()
    return points.groupby(octaves)[["nbytes", "value"]].agg(geometric_mean)


def _sweep_panel(axis: Axes, contestant: str, points: pd.DataFrame) -> None:
    points = points.sort_values("nbytes")
    how, ours = mark(contestant), contestant == OURS
    axis.set_yscale("log")
    axis.plot(
        points.nbytes,
        points.value,
        color=how.colour,
        marker="" if contestant == FLOOR else how.marker,
        markersize=4.5 if ours else 3.2,
        markeredgecolor=COLOURS["paper"],
        markeredgewidth=0.5,
        linewidth=2.0 if ours else 1.1,
        linestyle=(0, (2, 1.5)) if contestant == FLOOR else "-",
        zorder=5 if ours else 3,
    )


def _size_axis(axis: Axes, points: pd.DataFrame) -> None:
    low = math.floor(math.log2(points.nbytes.min()))
    high = math.ceil(math.log2(points.nbytes.max()))
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
            axis.axvline(size, color=COLOURS["muted"], linewidth=0.7, linestyle=(0, (1, 2)))
            axis.annotate(
                f"cache {bytes_text(size)}",
                (size, 1),
                xycoords=("data", "axes fraction"),
                xytext=(2, -7),
                textcoords="offset points",
                fontsize=6.5,
                color=COLOURS["muted"],
            )


def _handle(contestant: str) -> Artist:
    how = mark(contestant)
    line = contestant == FLOOR
    return Line2D(
        [],
        [],
        color=how.colour,
        linestyle="-" if line else "",
        marker="" if line else how.marker,
        label="floor (measured)" if line else label(contestant),
    )
