"""Ratio per cell: our time over each peer's, a line for every shape."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from benchmarks.model import Row
from benchmarks.report.canvas import COLOURS, Plot, mark, new_figure, quiet, show_legend
from benchmarks.report.figures import SWEEP, peer_columns
from benchmarks.report.words import label, shape_text

__all__ = ["ratio_plot"]

# Points.
_WIDTH = 700
_LINE = 12.5
_MARGIN = 76

_LAYOUTS = ("NCX", "NXC")
_TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)


def ratio_plot(op: str, dtype: str, frame: pd.DataFrame, target: float) -> Plot | None:
    """Draw the cells of one operation and type, except those of the sweep; None if there are none.

    Must be called in the context `look`. `target` is what the ratio should be at most.
    """
    frame = frame[frame.ratio.notna() & (frame.suite != SWEEP)]
    if frame.empty:
        return None
    rows = list(frame.row)
    lines = _lines(rows)
    panels = [layout for layout in _LAYOUTS if any(row.cell.layout == layout for row in rows)]
    figure, axes = new_figure(
        _WIDTH, len(lines) * _LINE + _MARGIN, 1, len(panels), sharey=True, sharex=True
    )
    ratios = [r for row in rows for peer in row.peers() if (r := row.ratio_to(peer)) is not None]
    for axis, layout in zip(axes[0], panels, strict=True):
        chosen = [row for row in rows if row.cell.layout == layout]
        _panel(axis, chosen, lines, target)
        axis.set_xlim(min([*ratios, 0.5]) / 1.25, max([*ratios, 1.0]) * 1.3)
        axis.set_title(layout)
        axis.set_xlabel("our time / peer's time (log scale)")
    _name_lines(axes[0][0], lines)
    show_legend(figure, _handles(rows))
    won = int((frame.ratio <= 1).sum())
    return Plot(
        name=f"ratio-{op}-{dtype}",
        title=f"Time of {op}, {dtype}, over each peer's",
        caption=(
            "One line per shape. Left of 1 we are faster. The large mark is the best peer, the "
            f"dashed line the target ({target}); every peer in its own form."
        ),
        alternative=(
            f"Our time of {op} in {dtype} over that of each peer, for {len(rows)} cells: at or "
            f"below the best peer's in {won}, above in {len(rows) - won}."
        ),
        figure=figure,
    )


def _lines(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what the lines of the plot show: (suite, shape), and (suite, "") for its heading."""
    suites: dict[str, dict[str, None]] = {}
    for row in rows:
        suites.setdefault(row.cell.suite, {})[shape_text(row.cell)] = None
    return [(suite, shape) for suite, shapes in suites.items() for shape in ("", *shapes)]


def _panel(
    axis: Axes, rows: Sequence[Row], lines: Sequence[tuple[str, str]], target: float
) -> None:
    places = {line: i for i, line in enumerate(lines)}
    axis.set_xscale("log")
    axis.axvspan(1, 1e3, color=COLOURS["lose"], zorder=0, linewidth=0)
    axis.axvline(1, color=COLOURS["ink"], linewidth=0.9, zorder=1)
    axis.axvline(target, color=COLOURS["muted"], linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
    points = pd.DataFrame(
        [
            (places[row.cell.suite, shape_text(row.cell)], ratio, peer.contestant, peer is best)
            for row in rows
            for best in [row.best_peer()]
            for peer in row.peers()
            if (ratio := row.ratio_to(peer)) is not None
        ],
        columns=["y", "ratio", "contestant", "best"],
    )
    best = points[points.best]
    for side, colour in ((best[best.ratio > 1], "loss"), (best[best.ratio <= 1], "backnorm")):
        axis.hlines(side.y, 1, side.ratio, color=COLOURS[colour], linewidth=1.6, zorder=2)
    for (contestant, large), found in points.groupby(["contestant", "best"]):
        how = mark(contestant)
        axis.plot(
            found.ratio,
            found.y,
            linestyle="",
            color=how.colour,
            marker=how.marker,
            markersize=6.5 if large else 4,
            markeredgecolor=COLOURS["paper"] if large else how.colour,
            markerfacecolor=how.colour if large else COLOURS["paper"],
            zorder=4 if large else 3,
        )
    axis.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
    axis.set_xticks([], minor=True)
    quiet(axis, "x")


def _name_lines(axis: Axes, lines: Sequence[tuple[str, str]]) -> None:
    axis.set_yticks(range(len(lines)), [shape or suite for suite, shape in lines])
    axis.set_ylim(len(lines) - 0.4, -0.6)
    for text, (_, shape) in zip(axis.get_yticklabels(), lines, strict=True):
        if not shape:
            text.set_fontweight("bold")
            text.set_color(COLOURS["ink"])


def _handles(rows: Sequence[Row]) -> list[Artist]:
    handles: list[Artist] = []
    for contestant in dict.fromkeys(name for name, _ in peer_columns(rows)):
        if any(peer.contestant == contestant for row in rows for peer in row.peers()):
            how = mark(contestant)
            handles.append(
                Line2D([], [], linestyle="", marker=how.marker, markersize=6, color=how.colour)
            )
            handles[-1].set_label(label(contestant))
    return handles
