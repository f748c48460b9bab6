"""Without the libraries that a report is made with nothing is measured in vain."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from backnorm.errors import ArgumentValueError
from benchmarks.command import app
from benchmarks.report import write_report


@pytest.mark.parametrize("library", ["jinja2", "matplotlib", "pandas", "tabulate"])
def test_a_missing_library_is_named_with_the_remedy(monkeypatch, library):
    for name in [name for name in sys.modules if name.startswith("benchmarks.")]:
        if name.startswith(("benchmarks.report", "benchmarks.options", "benchmarks.table")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    done = CliRunner().invoke(app, ["--quick"])
    assert done.exit_code == 2
    assert done.stderr == (
        f"backnorm: error: the report needs {library}, which is not installed: "
        "pip install --group bench\n"
    )


def test_a_folder_that_is_a_file_is_refused(result, tmp_path):
    path = tmp_path / "report"
    path.touch()
    with pytest.raises(ArgumentValueError, match="is not a folder"):
        write_report(result, path)
