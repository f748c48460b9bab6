"""Scripts that generate pages: their options, and the committed pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.pages import ROOT

SCRIPTS = pytest.mark.parametrize(
    "script", ["make_conformance_page", "make_dialects_page", "make_features_page"]
)


def run(script, flag):
    return subprocess.run(
        [sys.executable, "-m", f"scripts.{script}", flag],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip


@SCRIPTS
@pytest.mark.parametrize(("flag", "status"), [("--help", 0), ("--chek", 2)])
def test_page_script_with_help_or_unknown_flag_prints_usage(script, flag, status):
    done = run(script, flag)
    assert done.returncode == status
    assert f"usage: {script}.py [-h]" in done.stdout + done.stderr


@SCRIPTS
def test_committed_pages_are_current(script):
    done = run(script, "--check")
    assert done.returncode == 0, done.stderr
