"""The plan that the page about GPUs shows is the one that is made."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"


def test_gpu_page_code_prints_plan_shown_on_page(capsys):
    text = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    (shown,) = re.findall(r"^```text\n(.*?)^```", text, re.S | re.M)
    exec(code, {})
    assert capsys.readouterr().out == shown
