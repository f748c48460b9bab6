"""What a benchmark found: as a file, as Markdown, as a page with plots, and against an earlier one.

Importing this loads neither matplotlib nor Jinja: only drawing needs them.
"""

from __future__ import annotations

from benchmarks.report.compare import Comparison, compare
from benchmarks.report.html import to_html
from benchmarks.report.markdown import to_markdown
from benchmarks.report.result_file import read_result, write_result
from benchmarks.report.write import write_report

__all__ = [
    "Comparison",
    "compare",
    "read_result",
    "to_html",
    "to_markdown",
    "write_report",
    "write_result",
]
