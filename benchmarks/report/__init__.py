"""What a benchmark found: as a file, as Markdown, as a page, and against an earlier one."""

from __future__ import annotations

from benchmarks.report.compare import Comparison, compare
from benchmarks.report.pages import prepare, to_html, to_markdown, write_report
from benchmarks.report.result_file import read_result, write_result

__all__ = [
    "Comparison",
    "compare",
    "prepare",
    "read_result",
    "to_html",
    "to_markdown",
    "write_report",
    "write_result",
]
