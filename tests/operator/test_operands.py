"""A warm call, then one with an operand absent, of another kind or in another's place.

For every operand of every function on NumPy's arrays, and for `out`: the error that names it or the
right result, never a crash, in one process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import backnorm
from backnorm.signature import SIGNATURES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = Path(__file__).with_name("operands.py")
    log = tmp_path_factory.mktemp("operands") / "log"
    with log.open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", str(script)],
            stdout=stream, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
        )  # fmt: skip
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    found = {line["case"]: line["found"] for line in lines if "case" in line}
    return done, found, [line["begins"] for line in lines if "begins" in line]


def test_the_process_survives_every_call(run):
    done, found, begun = run
    last = begun[-1] if begun else "no case"
    assert done.returncode == 0, f"ended with {done.returncode} in {last!r}:\n{done.stderr}"
    assert list(found) == list(dict.fromkeys(begun))


def test_every_operand_of_every_operation_is_among_the_cases(run):
    _, found, _ = run
    for operation, signature in SIGNATURES.items():
        name = operation if hasattr(backnorm, operation) else f"batch_norm_{operation}"
        for operand in signature.operands:
            # Running statistics are PyTorch's.
            if operand.name.startswith("running"):
                continue
            cases = [case for case in found
                     if case.startswith(f"{name}(") and f": {operand.name} " in case]  # fmt: skip
            assert len(cases) > 25, (operation, operand.name)


@pytest.mark.parametrize(
    "name", ["apply", "batch_norm_backward", "batch_norm_forward", "batch_norm_inference"]
)
def test_out_is_among_the_cases(run, name):
    _, found, _ = run
    assert sum(case.startswith(f"{name}(") and ": out " in case for case in found) > 100


def test_each_gives_the_error_or_the_result_of_a_first_call(run):
    _, found, _ = run
    wrong = [f"{case}: {kinds}" for case, kinds in found.items()
             if kinds not in (["error"], ["result"])]  # fmt: skip
    assert not wrong, "\n".join(wrong)
