"""Tables for the reports of `backnorm run` and `backnorm demo`."""

from __future__ import annotations

from itertools import groupby

from rich.box import SIMPLE_HEAD
from rich.table import Table

from backnorm.cli.demo import DemoReport
from backnorm.cli.run import RunReport, TensorFacts
from backnorm.cli.text import counted, plain

_ULP_NOTE = (
    "ulp: largest error, in units in the last place; budget: largest error as a part of what is "
    "allowed at that element (where terms cancel, an ulp is not the measure)."
)


def run_table(report: RunReport) -> Table:
    """Return a row per operator that was run, followed by rows for its inputs and outputs."""
    caption = f"{counted(report.threads, 'thread')}; time: median of {report.repeat} warm calls. "
    table = _measurements_table(report.file, "operator", caption)
    for step in report.steps:
        label = "" if step.label == step.op else f", {step.label}"
        table.add_row(
            plain(f"{step.dialect}.{step.op}{label}"),
            step.layout or "",
            *_number_texts(step.seconds, step.gigabytes_per_second),
            *_error_texts(step.worst_ulp, step.budget_used, not step.failures),
        )
        for tensor in step.inputs:
            table.add_row(plain(f"  in  {_tensor_text(tensor)}"))
        for tensor in step.outputs:
            v = (step.check or {}).get(tensor.port)
            errors = _error_texts(v.worst_ulp, v.worst_excess, v.passed) if v else ()
            table.add_row(plain(f"  out {_tensor_text(tensor)}"), "", "", "", *errors)
        table.add_section()
    return table


def demo_table(report: DemoReport) -> Table:
    """Return, for each type, whether all results agree, and a row per dialect and layout."""
    layers = ", ".join(
        f"{layer['name']} {'x'.join(map(str, layer['shape']))}" for layer in report.layers
    )
    caption = (
        f"Layers {layers}, {counted(report.threads, 'thread')}. Time and "
        "bandwidth (x and dy read twice, dx written): over all layers, medians of warm calls. "
        "Where a dialect knows channel axis 1 alone, NXC is a view of channels-last memory. "
    )
    title = "Batch-normalisation gradients of a network that learns to read digits"
    table = _measurements_table(title, "call", caption)
    agree = {agreement.dtype: agreement.agree for agreement in report.agreements}
    for dtype, rows in groupby(report.rows, key=lambda row: row.dtype):
        where = " in a layout" if dtype.endswith("16") else ""
        same = f"all results{where} are the same bits"
        table.add_row(f"{dtype}: {same if agree[dtype] else 'RESULTS DIFFER'}")
        for row in rows:
            table.add_row(
                plain(f"  {row.call}"),
                row.layout,
                *_number_texts(row.seconds, row.gigabytes_per_second),
                *_error_texts(row.worst_ulp, row.budget_used, row.passed),
            )
        table.add_section()
    return table


def _measurements_table(title: str, subject: str, caption: str) -> Table:
    """Return an empty table: subject, layout, time, GB/s, ulp, budget."""
    table = Table(
        title=plain(title),
        title_justify="left",
        caption=caption + _ULP_NOTE,
        caption_justify="left",
        box=SIMPLE_HEAD,
        # Without padding, the longest call fits a terminal of 80 columns.
        padding=0,
        show_edge=False,
    )
    table.add_column(subject, overflow="fold")
    table.add_column("layout", no_wrap=True)
    for heading in ("time", "GB/s", "ulp", "budget"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _number_texts(seconds: float, gigabytes_per_second: float) -> tuple[str, str]:
    """Return a duration in a suitable unit, and a bandwidth, with three digits each."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}", f"{gigabytes_per_second:.3g}"
    return f"{seconds * 1e9:.0f} ns", f"{gigabytes_per_second:.3g}"


def _error_texts(ulp: float | None, budget: float | None, passed: bool) -> tuple[str, str]:
    """Return the worst error in ulps, and as a fraction of the budget; empty if not checked."""
    if ulp is None or budget is None:
        return "", ""
    text = f"{ulp:.4f}" if ulp < 10 else f"{ulp:.4g}"
    return text if passed else f"{text} FAILED", f"{budget:.1%}"


def _tensor_text(tensor: TensorFacts) -> str:
    """Return port, type and shape, and the tensor's name if it is not that of the port."""
    dims = "x".join(map(str, tensor.shape)) or "scalar"
    text = f"{tensor.port} {tensor.dtype} {dims}"
    if tensor.name is not None and tensor.name != tensor.port:
        text += f" ({tensor.name})"
    return f"{text} random" if tensor.random else text
