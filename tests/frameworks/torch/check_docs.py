"""The code on the page about PyTorch runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "pytorch.md"


def test_the_code_on_the_page_runs():
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(block, names)
    assert type(names["model"][1]).__module__.startswith("torch.nn")
