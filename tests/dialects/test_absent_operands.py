"""A warm call, then one with an operand absent, of another kind or in another's place.

For every operand of every operator, from the schemas: the documented error or the right result,
never a crash, in one process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from backnorm.dialects.registry import DIALECTS, operators


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    script = Path(__file__).with_name("absent_operands.py")
    log = tmp_path_factory.mktemp("absent") / "log"
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


def test_every_operand_of_every_operator_is_among_the_cases(run):
    _, found, _ = run
    for dialect in DIALECTS:
        for operator in operators(dialect).values():
            for schema in operator.schemas.values():
                name = "-".join(filter(None, (dialect, schema.op, schema.revision)))
                for tensor in schema.inputs:
                    cases = [case for case in found if case.startswith(f"{name}: {tensor.name} ")]
                    assert len(cases) > 15


def test_each_gives_the_error_or_the_result_of_a_first_call(run):
    _, found, _ = run
    wrong = [f"{case}: {kinds}" for case, kinds in found.items()
             if kinds not in (["error"], ["result"])]  # fmt: skip
    assert not wrong, "\n".join(wrong)
