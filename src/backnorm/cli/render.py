"""Tables for the reports of `backnorm run` and `backnorm demo`."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from backnorm.cli.demo import DemoReport
from backnorm.cli.run import RunReport, TensorFacts
from backnorm.errors import counted

_ERRORS_NOTE = (
    "ulp: largest error, in units in the last place; correct rounding has at most 0.5. budget: "
    "largest ratio of an element's error to its allowed error; correct rounding uses up to 100%, "
    "and more than 100% fails. An element whose terms nearly cancel may be many ulps off."
)


def run_table(report: RunReport) -> Table:
    """Return a table: a row per operator, followed by rows for its inputs and outputs."""
    caption = (
        f"{counted(report.threads, 'thread')}; time: median of {report.repeat} warm calls. "
        f"{_ERRORS_NOTE}"
    )
    table = _measurements_table(report.file, "operator", caption)
    for step in report.steps:
        label = "" if step.label == step.op else f", {step.label}"
        table.add_row(
            f"{step.dialect}.{step.op}{label}",
            step.layout or "",
            *_number_texts(step.seconds, step.gigabytes_per_second),
            *_error_texts(step.worst_ulp, step.budget_used, not step.failures),
        )
        for tensor in step.inputs:
            table.add_row(f"  in  {_tensor_text(tensor)}")
        for tensor in step.outputs:
            v = (step.check or {}).get(tensor.port)
            errors = _error_texts(v.worst_ulp, v.worst_excess, v.passed) if v else ()
            table.add_row(f"  out {_tensor_text(tensor)}", "", "", "", *errors)
        table.add_section()
    return table


def demo_summary(report: DemoReport) -> Table:
    """Return a table with a row for each element type.

    The columns include how many gradients are right, whether all dialects returned the same bits
    for the same data, and the time.
    """
    layers = ", ".join(
        f"{layer['name']} {'x'.join(map(str, layer['shape']))}" for layer in report.layers
    )
    caption = (
        f"Gradients of batch normalisation at the layers {layers} of a network that learns to read "
        f"digits, in two layouts, on {counted(report.threads, 'thread')}; time: all layers, median "
        "over the calls. Every dialect gets 1e-5 rounded to float32 as epsilon, because some "
        "specifications have a float32 epsilon. 16-bit results are compared within a layout, "
        "because the layout determines the order of float32 sums. backnorm demo --details prints a "
        "row per call."
    )
    headings = ("type", "dialects", "calls", "right gradients", "equal bits", "time")
    table = _plain_table(caption)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "type" else "right", no_wrap=True)
    agreements = {agreement.dtype: agreement for agreement in report.agreements}
    for dtype, group in groupby(report.rows, key=lambda row: row.dtype):
        rows = list(group)
        judged = sum(row.judged for row in rows)
        right = judged - sum(len(row.failures) for row in rows)
        table.add_row(
            dtype,
            str(len({row.dialect for row in rows})),
            str(len(rows)),
            f"{right} of {judged}",
            "yes" if agreements[dtype].agree else "NO",
            _duration_text(median(row.seconds for row in rows)),
        )
    return table


def demo_details(report: DemoReport) -> Table:
    """Return a table with a row per call, grouped by element type."""
    caption = (
        "Time and bandwidth (x and dy read twice, dx written): over all layers, medians of warm "
        "calls. For NXC, a dialect that has only channel axis 1 gets a view of channels-last "
        f"memory. {_ERRORS_NOTE} The gradient with the largest error is named. In most dialects, "
        "dgamma and dbeta of 16-bit data are float32: an ulp of float16 is 8192 ulps of float32, "
        "an ulp of bfloat16 65536."
    )
    table = _measurements_table("", "call", caption)
    for dtype, rows in groupby(report.rows, key=lambda row: row.dtype):
        table.add_row(dtype)
        for row in rows:
            ulp, budget = _error_texts(row.worst_ulp, row.budget_used, row.passed)
            table.add_row(
                f"  {row.call}",
                row.layout,
                *_number_texts(row.seconds, row.gigabytes_per_second),
                f"{row.worst_gradient} {ulp}",
                budget,
            )
        table.add_section()
    return table


def _measurements_table(title: str, subject: str, caption: str) -> Table:
    """Return an empty table with the columns subject, layout, time, GB/s, ulp and budget."""
    table = _plain_table(caption)
    table.title = title or None
    # With a padding of 0, the longest call fits a terminal of 80 columns.
    table.padding = 0
    table.add_column(subject, overflow="fold")
    table.add_column("layout", no_wrap=True)
    for heading in ("time", "GB/s", "ulp", "budget"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _plain_table(caption: str) -> Table:
    return Table(
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
    )


def _number_texts(seconds: float, gigabytes_per_second: float) -> tuple[str, str]:
    return _duration_text(seconds), _three_digits(gigabytes_per_second)


def _duration_text(seconds: float) -> str:
    """Return a duration as text: three digits, in the largest unit in which it is at least 1."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        # Rounded to three digits, 999.6 µs is 1000 µs, so it is shown as 1 ms.
        if float(f"{seconds * scale:.3g}") >= 1.0:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def _three_digits(number: float) -> str:
    """Return a number rounded to three digits; from 1000 on, return it rounded to an integer."""
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def _error_texts(ulp: float | None, budget: float | None, passed: bool) -> tuple[str, str]:
    """Return two texts: the worst error in ulps, and the worst error in percent of the budget.

    Both texts are empty if the output was not checked.
    """
    if ulp is None or budget is None:
        return "", ""
    text = f"{ulp:.4f}" if ulp < 10 else f"{ulp:.4g}"
    return text if passed else f"{text} FAILED", f"{budget:.1%}"


def _tensor_text(tensor: TensorFacts) -> str:
    """Return a tensor's port, type and shape as text.

    If the tensor's name differs from the name of the port, the text also has the tensor's name.
    """
    dims = "x".join(map(str, tensor.shape)) or "scalar"
    text = f"{tensor.port} {tensor.dtype} {dims}"
    if tensor.name is not None and tensor.name != tensor.port:
        text += f" ({tensor.name})"
    return f"{text} random" if tensor.random else text
