"""The plots of a report."""

from __future__ import annotations

from benchmarks.model import Result
from benchmarks.report.canvas import COLOURS, Plot, look
from benchmarks.report.figures import SWEEP, TARGETS, cells, distinct, groups, preferred
from benchmarks.report.plots.curves import roofline_plot, sweep_plot
from benchmarks.report.plots.ratio import ratio_plot
from benchmarks.report.words import roof

__all__ = ["COLOURS", "Plot", "draw"]


def draw(result: Result) -> list[Plot]:
    """Return all plots that `result` has the cells for: ratios, rooflines, the size sweep."""
    frame, targets = cells(result), TARGETS[result.device]
    times = preferred(distinct(result.rows))
    # The sweep is a curve, of which no cell may be missing because another suite has it, too.
    sweep = preferred(row for row in result.rows if row.cell.suite == SWEEP)
    with look():
        plots = [ratio_plot(op, dtype, found, targets[op]) for (op, dtype), found in groups(frame)]
        dtypes = frame.dtype.unique()
        plots += [roofline_plot(each, times, result.caches, roof(result)) for each in dtypes]
        plots.append(sweep_plot(sweep, result.caches))
    return [plot for plot in plots if plot]
