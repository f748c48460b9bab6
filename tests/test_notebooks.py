"""The notebooks of `examples/` run, and print what is stored in them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


def test_notebooks_include_quickstart_and_which_variance():
    assert {path.stem for path in NOTEBOOKS} >= {"quickstart", "which_variance"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_cells_print_stored_output(path):
    names = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        stored = "".join(text for output in cell["outputs"] for text in output["text"])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, {cell['id']}", "exec"), names)
        assert printed.getvalue() == stored, cell["id"]
