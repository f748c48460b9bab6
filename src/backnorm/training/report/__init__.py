"""What a training, or the timing of a wide step, found: a page with plots.

Importing this loads neither matplotlib nor Jinja: only drawing needs them.
"""

from __future__ import annotations

from backnorm.training.report.write import write_report

__all__ = ["write_report"]
