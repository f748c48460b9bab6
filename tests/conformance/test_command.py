"""A program reads the inputs of a case from files, and its ends and its outputs are judged."""

from __future__ import annotations

import sys

import pytest

from backnorm.conformance.verify.cases import Selection
from backnorm.conformance.verify.findings import findings
from backnorm.conformance.verify.job import Job
from backnorm.conformance.verify.run import verify
from backnorm.errors import ArgumentValueError

PROGRAM = r"""
import json, os, sys, time
from pathlib import Path
import numpy as np
inputs, outputs, mistake = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
[case] = json.loads((inputs / "manifest.json").read_text())["cases"]
results, call = outputs / case["name"], case["call"]
if mistake == "exits":
    sys.exit("no device")
if mistake == "aborts":
    os.abort()
if mistake == "hangs":
    time.sleep(60)
if call["data_format"] != "NCX":
    (results / "unsupported.txt").write_text("NCX alone")
    sys.exit()
x, dy, mean, variance, gamma = (
    np.fromfile(inputs / part["file"], part["dtype"]).astype("d").reshape(part["shape"])
    for part in case["inputs"].values()
)
axes, kept, count = (0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2)), x.size // mean.size
s = 1 / np.sqrt(variance + float.fromhex(call["epsilon"])).reshape(kept)
normalized = (x - mean.reshape(kept)) * s
dbeta, dgamma = dy.sum(axes), (dy * normalized).sum(axes)
dx = dy
if call["training"]:
    dx = dy - (dbeta.reshape(kept) + normalized * dgamma.reshape(kept)) / count
if mistake == "gamma":
    dgamma *= gamma
found = {"dx": dx * gamma.reshape(kept) * s, "dgamma": dgamma, "dbeta": dbeta}
if mistake == "leaves":
    del found["dbeta"]
if mistake == "short":
    found["dbeta"] = dbeta[:1]
for name, array in found.items():
    array.astype("f").tofile(results / f"{name}.bin")
"""


def run_of(mistake, folder, layouts=("NCX",), timeout=30.0):
    program = folder / "mine.py"
    program.write_text(PROGRAM)
    selection = Selection(
        dtypes=("float32",), layouts=layouts, only=("diagnostic-float32*",), seed=3
    )
    command = f"{sys.executable} {program} {{inputs}} {{outputs}} {mistake}"
    return verify(Job(command, selection, timeout=timeout, command=True))


def test_verify_of_right_command_has_no_finding_and_counts_refusals(tmp_path):
    results = run_of("none", tmp_path, ("NCX", "NXC"))
    assert findings(results) == []
    assert {(v.layout, v.is_judged) for v in results.verdicts} == {("NCX", True), ("NXC", False)}
    assert {v.text for v in results.verdicts if v.layout == "NXC"} == {"NCX alone"}


FORWARD_PROGRAM = """
import json, sys
from pathlib import Path
import numpy as np

inputs, outputs, ddof = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
(case,) = json.loads((inputs / "manifest.json").read_text())["cases"]
x, gamma, beta = (
    np.fromfile(inputs / part["file"], part["dtype"]).astype("d").reshape(part["shape"])
    for part in case["inputs"].values()
)
# The axes of a row, and the shape that spreads parameters.
axes, spread = {
    "forward": ((0, *range(2, x.ndim)), (-1, *[1] * (x.ndim - 2))),
    "layer-norm-forward": (-1, -1),
}[case["call"]["operator"]]
mean, variance = x.mean(axes, keepdims=True), x.var(axes, ddof=ddof, keepdims=True)
s = 1 / np.sqrt(variance + float.fromhex(case["call"]["epsilon"]))
y = (x - mean) * s * gamma.reshape(spread) + beta.reshape(spread)
for name, array in {"y": y, "mean": mean, "variance": variance}.items():
    array.astype("f").tofile(outputs / case["name"] / f"{name}.bin")
"""


@pytest.mark.parametrize(
    ("operation", "ddof", "ids"),
    [("forward", 0, []), ("forward", 1, ["bessel"]), ("layer-norm-forward", 1, ["bessel"])],
)
def test_verify_judges_command_of_forward_pass(operation, ddof, ids, tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(FORWARD_PROGRAM)
    layout = "NCX" if operation == "forward" else "NXC"
    only = ("diagnostic-float32*",)
    selection = Selection("smoke", ("float32",), (layout,), only=only, operation=operation)
    command = f"{sys.executable} {program} {{inputs}} {{outputs}} {ddof}"
    results = verify(Job(command, selection, command=True))
    assert [each.id for each in findings(results)] == ids
    assert {v.output for v in results.verdicts if v.is_judged} == {"y", "mean", "variance"}


def test_verify_of_wrong_command_gives_command_that_reproduces_it(tmp_path):
    [finding] = findings(run_of("gamma", tmp_path))
    assert finding.id == "dgamma-gamma"
    assert finding.reproduce.startswith(f"backnorm verify --command '{sys.executable} ")


@pytest.mark.parametrize(
    ("mistake", "status", "text"),
    [
        ("exits", "crash", "status 1: no device"),
        ("aborts", "crash", "SIGABRT"),
        (
            "leaves",
            "not_written",
            "no dbeta (missing or None) in 1 case: diagnostic-float32-float32-NCX",
        ),
        ("short", "wrong", "; got 4 bytes, expected 52: float32 of shape (13,)"),
        pytest.param("hangs", "hang", "does not return", marks=pytest.mark.long),
    ],
)
def test_verify_command_that_fails_is_a_finding(mistake, status, text, tmp_path):
    results = run_of(mistake, tmp_path, timeout=2.0 if mistake == "hangs" else 30.0)
    found = findings(results)
    assert status in {v.status for v in results.verdicts}
    assert any(text in each.says for each in found), [each.says for each in found]


def test_verify_command_that_fails_eight_times_is_not_run_again():
    selection = Selection(dtypes=("float32",))
    results = verify(Job("false {inputs} {outputs}", selection, command=True))
    statuses = [*{v.case: v.status for v in results.verdicts}.values()]
    assert statuses == ["crash"] * 8 + ["not_run"] * (len(statuses) - 8)
    assert "8 processes in a row" in results.verdicts[-1].text


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("ls {inputs}", r"^SUBJECT: must be a command with {inputs} and {outputs}; got ls"),
        ("no-such {inputs} {outputs}", "^SUBJECT: no such program; got no-such$"),
    ],
)
def test_verify_rejects_invalid_command(command, text):
    with pytest.raises(ArgumentValueError, match=text):
        verify(Job(command, Selection(dtypes=("float32",)), command=True))
