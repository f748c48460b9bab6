"""The README's code runs, and the files that it names exist."""

from __future__ import annotations

import re
from pathlib import Path

_README = Path(__file__).parent.parent / "README.md"


def test_the_code_of_the_readme_runs_and_agrees_with_itself(capsys):
    blocks = re.findall(r"```python\n(.*?)```", _README.read_text(), re.DOTALL)
    # What needs a framework runs with the checks of the framework.
    blocks = [block for block in blocks if not re.search(r"backnorm\.(torch|jax|keras)", block)]
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(_README), "exec"), names)
    assert "backward float32 32x64x28x28" in capsys.readouterr().out
    for name in ("diff_src", "input_delta", "x_backprop"):
        assert names[name].shape == names["dx"].shape
    assert names["diff_src"].tobytes() == names["x_backprop"].tobytes()
    assert names["gradients"].dresidual.shape == names["dx"].shape
    assert names["dx_first"].tobytes() == names["dx"][:10].tobytes()
    assert names["dy"].tobytes() == names["dx"].tobytes()


def test_every_file_that_the_readme_names_exists():
    text = _README.read_text()
    named = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"(?:docs|src)/[\w./-]+\w", text)
    assert named
    for name in named:
        assert (_README.parent / name).exists(), name
