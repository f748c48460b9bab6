"""Tables of what a run reports."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.padding import PaddingDimensions
from rich.table import Table
from rich.text import Text

from backnorm.cli.report import RunReport, StepReport, TensorFacts
from backnorm.cli.text import counted, plain
from backnorm.conformance.judge import Verdict

__all__ = [
    "ULP_NOTE",
    "captioned_table",
    "measurements_table",
    "number_texts",
    "run_table",
    "ulp_text",
]

ULP_NOTE = (
    "ulp: largest error, in units in the last place; budget: largest error as a part of what is "
    "allowed at that element (where terms cancel, an ulp is not the measure)."
)


def run_table(report: RunReport) -> Table:
    """Return a row per operator that was run, followed by rows for its inputs and outputs."""
    threads = counted(report.threads, "thread")
    caption = f"{threads}; time: median of {report.repeat} warm calls. {ULP_NOTE}"
    table = measurements_table(report.file, "operator", caption)
    for step in report.steps:
        table.add_row(
            plain(_operator_text(step)),
            step.layout,
            *number_texts(step.seconds, step.bandwidth),
            ulp_text(step.worst_ulp, passed=step.passed),
            _budget_text(step.budget_used),
        )
        for tensor in step.inputs:
            table.add_row(plain(f"  in  {_tensor_text(tensor)}"))
        for tensor in step.outputs:
            verdict = (step.verdicts or {}).get(tensor.port)
            table.add_row(plain(f"  out {_tensor_text(tensor)}"), "", "", "", *_verdict(verdict))
        table.add_section()
    return table


def captioned_table(title: str, caption: str | Text, padding: PaddingDimensions) -> Table:
    """Return an empty table without a frame, its title above and its caption below, at the left.

    Parameters
    ----------
    title : str
        Shown as it is.
    caption : str or rich.text.Text
        A string is read as rich's markup, and faint; what comes from elsewhere has to be a text.
    padding : tuple of int
        Around each cell, as rich has it.
    """
    return Table(
        title=plain(title),
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=padding,
        show_edge=False,
    )


def measurements_table(title: str, subject: str, caption: str) -> Table:
    """Return an empty table: subject, layout, time, GB/s, ulp, budget."""
    # As tight as it goes: the longest call fits a terminal of 80 columns.
    table = captioned_table(title, caption, padding=0)
    table.add_column(subject, overflow="fold")
    table.add_column("layout", no_wrap=True)
    for heading in ("time", "GB/s", "ulp", "budget"):
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def number_texts(seconds: float, gigabytes_per_second: float) -> tuple[str, str]:
    """Return a duration in the unit that suits it, and a bandwidth, of three digits each."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1.0:
            return f"{seconds * scale:.3g} {unit}", f"{gigabytes_per_second:.3g}"
    return f"{seconds * 1e9:.0f} ns", f"{gigabytes_per_second:.3g}"


def ulp_text(worst: float | None, *, passed: bool) -> str:
    """Return a worst error in ulps, and a word if it is too much."""
    if worst is None:
        return ""
    text = f"{worst:.4f}" if worst < 10 else f"{worst:.4g}"
    return text if passed else f"{text} FAILED"


def _budget_text(used: float | None) -> str:
    return "" if used is None else f"{used:.1%}"


def _verdict(verdict: Verdict | None) -> tuple[str, str]:
    if verdict is None:
        return "", ""
    return (
        ulp_text(verdict.worst_ulp, passed=verdict.passed),
        _budget_text(verdict.worst_excess),
    )


def _operator_text(step: StepReport) -> str:
    text = f"{step.dialect}.{step.op}"
    return text if step.label == step.op else f"{text}, {step.label}"


def _tensor_text(tensor: TensorFacts) -> str:
    """Return port, type and shape, and the tensor's name where that differs."""
    dims = "x".join(map(str, tensor.shape)) or "scalar"
    text = f"{tensor.port} {tensor.dtype} {dims}"
    if tensor.name is not None and tensor.name != tensor.port:
        text += f" ({tensor.name})"
    return f"{text} random" if tensor.random else text
