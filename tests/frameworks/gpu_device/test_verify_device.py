"""`backnorm verify --device cuda`: the kernel of the page, PyTorch's operator, failing kernels."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from backnorm.cli.app import app
from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.run import verify
from tests.support.pages import ROOT

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SUBJECTS = ROOT / "tests" / "conformance" / "device_subjects.py"
SMALL = Selection(dtypes=("float32",), layouts=("NCX",), only=("diagnostic-*",))


def test_verify_of_page_kernel_on_device_names_its_mistake(tmp_path, monkeypatch):
    page = (ROOT / "docs/how-to/verify.md").read_text("utf-8")
    code = re.search(r"^```text\n(import .+?)^```", page, re.M | re.S)[1]
    (tmp_path / "mytriton.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    command = re.search(r"^backnorm (verify mytriton.py.+ --device cuda)$", page, re.M)[1]
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 1
    assert "M - 1 is used for M" in done.output


def test_verify_of_aten_operator_on_device_has_no_finding():
    name = "torch.ops:aten.native_batch_norm_backward"
    results = verify(Job(name, dialect="aten", tensors="torch", device="cuda"))
    assert findings(results) == []


@pytest.mark.parametrize(("name", "expected"), [("right", []), ("writes_dy", ["changed_input"])])
def test_verify_of_function_on_device_reports_what_it_writes(name, expected):
    results = verify(Job(f"{SUBJECTS}:{name}", SMALL, tensors="torch", device="cuda"))
    assert [each.id for each in findings(results)] == expected


def test_verify_reports_failed_kernel_in_its_case_and_runs_the_others(tmp_path):
    subject = Path(tmp_path, "mine.py")
    subject.write_text(
        "import torch\n"
        "from tests.conformance.device_subjects import right\n"
        "def backward(x, *others, **options):\n"
        "    found = right(x, *others, **options)\n"
        "    if not options['training']:\n"
        "        x.reshape(-1)[torch.full((1,), 1 << 40, device=x.device)]\n"
        "    return found\n"
    )
    results = verify(Job(f"{subject}:backward", SMALL, tensors="torch", device="cuda"))
    (finding,) = findings(results)
    assert finding.id == "crash"
    assert finding.cases == {"diagnostic-frozen-float32-float32-NCX"}
