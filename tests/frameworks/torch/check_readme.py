"""The README's code for torch runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_README = Path(__file__).parents[3] / "README.md"


def test_the_code_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "backnorm.torch" in block]
    x = np.random.default_rng(0).standard_normal((4, 5, 3), dtype=np.float32)
    names = {"x": x, "gamma": np.ones(3, np.float32), "beta": np.zeros(3, np.float32)}
    exec(compile(block, str(_README), "exec"), names)
    model = names["model"]
    assert not any(type(module) is names["torch"].nn.BatchNorm2d for module in model.modules())
    assert model(names["torch"].randn(2, 3, 8, 8)).shape == (2, 8, 6, 6)
