"""What the checks of all frameworks share, each in its own process; imports none of them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

_README = Path(__file__).parents[2] / "README.md"


@pytest.fixture
def run_readme():
    """Run the one block of the README's code that names a module; returns the block's names.

    It finds x of (4, 5, 3), channels last, and gamma and beta, as the README's other code has them.
    """

    def run(module):
        blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
        (block,) = [block for block in blocks if module in block]
        x = np.random.default_rng(0).standard_normal((4, 5, 3), dtype=np.float32)
        names = {"x": x, "gamma": np.ones(3, np.float32), "beta": np.zeros(3, np.float32)}
        exec(compile(block, str(_README), "exec"), names)
        return names

    return run
