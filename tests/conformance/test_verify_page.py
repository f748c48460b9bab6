"""The screens and the code of docs/how-to/verify.md are what the commands print and compute."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib import resources
from importlib.util import find_spec

import numpy as np
import pytest

import backnorm
from backnorm.conformance.verify.verdicts import STATUSES
from tests.support.pages import ROOT, blocks
from tests.support.required import require

PAGE = "docs/how-to/verify.md"
_SCREENS = re.findall(
    r"^```console\n\$ ((?:TRITON_INTERPRET=1 )?backnorm .+)\n((?:(?!```).*\n)+)^```",
    (ROOT / PAGE).read_text("utf-8"),
    re.M,
)
# The code on the page that needs PyTorch: the page is run without it.
_TORCH = dict(
    zip(
        ("mytriton.py", "mymodule.py"),
        re.findall(r"^```text\n(import .+?)^```", (ROOT / PAGE).read_text("utf-8"), re.M | re.S),
        strict=True,
    )
)

_FILES = {
    "backward": "mykernel.py",
    "forward": "myforward.py",
    "cudnn_batch_norm_backward": "mycudnn.py",
    "vectors": "myvectors.py",
}


def printed(command, folder):
    """Return the lines that a command prints on a wide terminal, without their seconds."""
    variables, _, words = command.rpartition("backnorm ")
    done = subprocess.run(
        [sys.executable, "-m", "backnorm", *shlex.split(words)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"} | dict(v.split("=") for v in variables.split()),
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return lines_of(done.stdout)


def lines_of(text):
    without_seconds = (re.sub(r", \d+\.\d s$", "", line.rstrip()) for line in text.splitlines())
    return [line for line in without_seconds if line]


@pytest.mark.parametrize(
    ("command", "screen"),
    [
        pytest.param(
            *each,
            marks=[pytest.mark.long]
            if re.search("audit|export|mymodule|--operation|--budget|TRITON", each[0])
            else [],
        )
        for each in _SCREENS
    ],
)
def test_verify_page_screen_matches_printed_lines(command, screen, tmp_path):
    for file, code in _TORCH.items():
        if file in command:
            require(find_spec("torch") and find_spec("triton"), "torch and triton")
            (tmp_path / file).write_text(code)
    for name, file in _FILES.items():
        code = next(block.code for block in blocks(PAGE) if f"def {name}(" in block.code)
        (tmp_path / file).write_text(code)
    found = printed(command, tmp_path)
    for line in lines_of(screen):
        # Three dots stand for any number of lines.
        if line.strip() == "...":
            continue
        assert line in found, "\n".join(found)
        found = found[found.index(line) + 1 :]


@pytest.mark.long
def test_verify_page_known_failures_are_those_of_its_function(tmp_path):
    (tmp_path / "mykernel.py").write_text(
        next(block.code for block in blocks(PAGE) if "def backward(" in block.code)
    )
    page = (ROOT / PAGE).read_text("utf-8")
    command = re.search(r"^(backnorm verify .+ --write-xfail known.txt)$", page, re.M)[1]
    printed(command, tmp_path)
    text = (tmp_path / "known.txt").read_text()
    assert f"```text\n{text}```" in page


def test_verify_page_c_code_equals_part_of_header():
    folder = resources.files("backnorm.conformance.verify") / "include"
    header = (folder / "backnorm_subject.h").read_text("utf-8")
    (code,) = re.findall(r"^```c\n(.+?)^```", (ROOT / PAGE).read_text("utf-8"), re.M | re.S)
    assert code in header


def test_verify_page_lists_exactly_the_statuses():
    page = (ROOT / PAGE).read_text("utf-8")
    section = page.partition("## Statuses")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)`", section)) == set(STATUSES)


def test_verify_page_code_accepts_right_and_rejects_scaled_results(tmp_path, monkeypatch):
    (code,) = (block.code for block in blocks(PAGE) if "manifest.json" in block.code)
    printed("backnorm cases export cases --dtypes float32,bfloat16 --only 'realistic-*'", tmp_path)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(code, PAGE, "exec"), names)
    count = 0
    for case in names["cases"]("cases"):
        inputs, options = case["inputs"], case["call"]
        epsilon = float.fromhex(options["epsilon"])
        layout, training = options["data_format"], options["training"]
        results = backnorm.batch_norm_backward(
            *(inputs.get(name) for name in ("x", "dy", "mean", "variance", "gamma")),
            epsilon=epsilon, data_format=layout, training=training,
        )  # fmt: skip
        for name, result in zip(("dx", "dgamma", "dbeta"), results, strict=True):
            if result is not None:
                assert names["within"](case, name, result, "float32")
                assert not names["within"](case, name, result * np.float32(1.5), "serial")
                count += 1
    assert count >= 12
