"""The README's code for jax runs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

_README = Path(__file__).parents[3] / "README.md"


def test_the_code_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "backnorm.jax" in block]
    x = np.random.default_rng(0).standard_normal((4, 5, 3), dtype=np.float32)
    names = {"x": x, "gamma": np.ones(3, np.float32), "beta": np.zeros(3, np.float32)}
    exec(compile(block, str(_README), "exec"), names)
    np.testing.assert_allclose(names["mean"], x.mean((0, 1)), atol=1e-6)
    np.testing.assert_allclose(names["variance"], x.var((0, 1)), atol=1e-6)
