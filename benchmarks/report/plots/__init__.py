"""The plots of a report."""

from __future__ import annotations

from benchmarks.model import Result
from benchmarks.report.canvas import COLOURS, Plot, look
from benchmarks.report.figures import TARGETS, groups
from benchmarks.report.plots.curves import roofline_plot, sweep_plot
from benchmarks.report.plots.ratio import ratio_plot
from benchmarks.report.words import roof

__all__ = ["COLOURS", "Plot", "draw"]


def draw(result: Result) -> list[Plot]:
    """Return all plots that `result` has the cells for: ratios, rooflines, the size sweep.

    Raises
    ------
    BacknormError
        If matplotlib is not installed.
    """
    chosen = groups(result.rows)
    caches, targets = result.caches, TARGETS[result.device]
    with look():
        plots = [ratio_plot(op, dtype, rows, targets[op]) for (op, dtype), rows in chosen.items()]
        dtypes = dict.fromkeys(dtype for _, dtype in chosen)
        plots += [roofline_plot(dtype, result.rows, caches, roof(result)) for dtype in dtypes]
        plots.append(sweep_plot(result.rows, caches))
    return [plot for plot in plots if plot]
