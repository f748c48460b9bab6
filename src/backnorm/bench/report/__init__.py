"""What a benchmark found: as a file, as Markdown, as a page with plots, and against an earlier one.

Importing this loads neither matplotlib nor Jinja: only drawing needs them.
"""

from __future__ import annotations

from backnorm.bench.report.compare import Comparison, compare
from backnorm.bench.report.html import to_html
from backnorm.bench.report.markdown import to_markdown
from backnorm.bench.report.result_file import read_result, write_result
from backnorm.bench.report.write import write_report

__all__ = [
    "Comparison",
    "compare",
    "read_result",
    "to_html",
    "to_markdown",
    "write_report",
    "write_result",
]
