"""The table of `backnorm demo`."""

from __future__ import annotations

from itertools import groupby

from rich.table import Table

from backnorm.cli.demo import DemoReport
from backnorm.cli.render import ULP_NOTE, measurements_table, number_texts, ulp_text
from backnorm.cli.text import counted, plain
from backnorm.dtypes import is_16_bit

__all__ = ["demo_table"]


def demo_table(report: DemoReport) -> Table:
    """Return, for each type, whether all results agree, and a row per dialect and layout."""
    layers = ", ".join(
        f"{layer.name} {'x'.join(map(str, layer.x.shape))}" for layer in report.layers
    )
    caption = (
        f"Layers {layers}, {counted(report.threads, 'thread')}. Time and "
        "bandwidth (x and dy read twice, dx written): over all layers, medians of warm calls. "
        "Where a dialect knows channel axis 1 alone, NXC is a view of channels-last memory. "
        f"{ULP_NOTE}"
    )
    title = "Batch-normalisation gradients of a network that learns to read digits"
    table = measurements_table(title, "call", caption)
    agree = {a.dtype: not a.differences for a in report.agreements}
    for dtype, rows in groupby(report.rows, key=lambda row: str(row.case.dtype)):
        rows_of = list(rows)
        where = " in a layout" if is_16_bit(rows_of[0].case.dtype) else ""
        same = f"all results{where} are the same bits"
        table.add_row(f"{dtype}: {same if agree[dtype] else 'RESULTS DIFFER'}")
        for row in rows_of:
            table.add_row(
                plain(f"  {row.case.call}"),
                row.case.layout,
                *number_texts(row.seconds, row.bandwidth),
                ulp_text(row.worst_ulp, passed=not row.failures),
                f"{row.budget_used:.1%}",
            )
        table.add_section()
    return table
