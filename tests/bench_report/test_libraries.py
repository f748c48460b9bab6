"""Only drawing needs the libraries of the group `bench`, and says so where they are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from backnorm.errors import ArgumentValueError, BacknormError
from benchmarks.report import to_html, to_markdown, write_report

ROOT = Path(__file__).parents[2]


def test_importing_loads_neither_plots_nor_templates():
    code = """
import sys
from benchmarks.report import compare, read_result, to_markdown, write_result
print(sorted({"matplotlib", "jinja2", "PIL", "torch", "jax", "tensorflow"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("library", ["matplotlib", "jinja2"])
def test_a_missing_library_is_named_with_the_remedy(result, tmp_path, monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    expected = rf"{library}.*pip install --group bench"
    with pytest.raises(BacknormError, match=expected):
        to_html(result)
    with pytest.raises(BacknormError, match=expected):
        write_report(result, tmp_path)
    assert (tmp_path / "result.json").exists(), "the measurements are safe"
    assert to_markdown(result)


def test_a_folder_that_is_a_file_is_refused(result, tmp_path):
    path = tmp_path / "report"
    path.touch()
    with pytest.raises(ArgumentValueError, match="is not a folder"):
        write_report(result, path)
