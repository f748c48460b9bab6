"""Scripts that generate pages: their options, and the committed pages."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from backnorm.conformance.audit.policies import POLICIES
from scripts import conformance_field
from tests.support.pages import ROOT

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


def test_measured_result_has_the_policies_of_the_package():
    result = json.loads((ROOT / "docs" / "conformance.json").read_text(encoding="utf-8"))
    stored = {row["label"]: (row["tolerance"], row["source"]) for row in result["tests"]}
    policies = {name: (each.text("float32"), each.source) for name, each in POLICIES.items()}
    assert policies.items() <= stored.items()


def test_subject_of_command_has_its_verdicts_and_findings():
    command = (
        "BACKNORM_ARITHMETIC=float32 backnorm verify "
        "tests/conformance/wrong_subjects.py:DbetaWithS --only 'diagnostic-bfloat16*'"
    )
    row = conformance_field.subject("Wrong", "numpy", command)
    assert (row["label"], row["command"]) == ("Wrong", command)
    assert row["version"] == f"numpy {np.__version__}"
    assert (row["cases"], row["of"], row["judged"], row["passed"]) == (2, 2, 6, 4)
    assert row["cells"]["float32 NCX"]["dx"] == "not_run"
    for layout in ("NCX", "NXC"):
        cells = row["cells"][f"bfloat16 {layout}"]
        assert cells.pop("dbeta") == "wrong"
        assert not {*cells.values()} & {"wrong", "not_run"}
    (finding,) = row["findings"]
    assert finding["cases"] == 2
    assert finding["reproduce"].startswith("BACKNORM_ARITHMETIC=float32 backnorm verify tests/")
    assert "--timeout" not in finding["reproduce"]


def test_subject_that_ends_its_process_in_a_case_keeps_rungs_of_others(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os\nfrom backnorm.conformance.formula import BACKWARD\n\n"
        "def backward(x, *inputs, **options):\n"
        "    return BACKWARD(x, *inputs, **options) if x.size else os.abort()\n"
    )
    names = "--only 'grid-0x5x4-float32*' --only 'realistic-float32-float32-NCX'"
    row = conformance_field.subject(
        "Mine", "numpy", f"backnorm verify {tmp_path / 'mine.py'}:backward {names}"
    )
    assert set(row["cells"]["float32 NCX"].values()) == {"exact, crash"}
    assert set(row["cells"]["float32 NXC"].values()) == {"crash"}
    (finding,) = row["findings"]
    assert (finding["findings"], finding["cases"]) == (1, 2)
    assert "SIGABRT" in finding["says"]


def test_measured_with_parts_keeps_earlier_measurements(monkeypatch):
    stored = {"subjects": [{"label": "PyTorch"}, {"label": "NumPy, textbook"}], "points": "earlier"}
    monkeypatch.setattr(conformance_field, "subject", lambda label, *_: {"label": label, "new": 1})
    *_, found = conformance_field.measured(stored, ["numpy"])
    assert found == stored | {
        "subjects": [{"label": "PyTorch"}, {"label": "NumPy, textbook", "new": 1}]
    }
    with pytest.raises(SystemExit, match="unknown part; got flax; expected"):
        list(conformance_field.measured(stored, ["flax"]))


def test_output_of_failing_command_raises_system_exit():
    with pytest.raises(SystemExit, match="exit status 2"):
        conformance_field.subject("Unknown", "numpy", "backnorm verify nothing")
