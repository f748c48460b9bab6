"""The decorator and the plug-in of pytest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import backnorm
from backnorm.conformance import pytest as bn

WRONG_FILE = Path(__file__).parent / "wrong_subjects.py"
SOURCES = str(Path(backnorm.__file__).parents[1])


@bn.cases(dtypes=["float32"], only=["diagnostic-*", "realistic-*"])
def test_cases_of_this_package_pass(case):
    case.check(backnorm.batch_norm_backward)


def run_pytest(folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "_backnorm_pytest",
         "-p", "no:xdist", *arguments],
        cwd=folder, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": SOURCES, "PATH": "/usr/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


def test_decorator_names_the_mistake(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import importlib.util\n"
        "import backnorm.conformance.pytest as bn\n"
        f"spec = importlib.util.spec_from_file_location('wrong', {str(WRONG_FILE)!r})\n"
        "wrong = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(wrong)\n"
        "@bn.cases(dtypes=['float32'], only=['diagnostic-float32-float32-NCX'])\n"
        "def test_mine(case):\n"
        "    case.check(wrong.DgammaWithGamma)\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 1
    assert "dgamma is multiplied by gamma" in done.stdout


def test_plugin_without_the_option_imports_nothing(tmp_path):
    (tmp_path / "test_nothing.py").write_text(
        "import sys\ndef test_it():\n    assert 'backnorm' not in sys.modules\n"
    )
    assert run_pytest(tmp_path).returncode == 0


def test_plugin_with_a_subject_has_a_test_for_each_output(tmp_path):
    done = run_pytest(
        tmp_path, "--backnorm", f"{WRONG_FILE}:DbetaWithS", "--backnorm-dtypes", "float32",
        "-k", "diagnostic-float32-float32-NCX", "--backnorm-report", "report.json",
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["findings"][0]["id"] == "dbeta-s"
