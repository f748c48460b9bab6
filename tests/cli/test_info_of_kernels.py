"""`backnorm info` of the machine code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from backnorm.errors import MachineCodeError

pytest.importorskip("backnorm_kernels", reason="backnorm-kernels is not installed")

from backnorm_kernels import library
from backnorm_kernels.kinds import LIBRARIES
from backnorm_kernels.levels import below, is_x86


def test_info_shows_machine_code(cli):
    code = json.loads(cli("info", "--json").stdout)["machine_code"]
    assert code["level"] == library.level()
    assert code["folder"] == str(library.FOLDER)
    assert set(code["libraries"]) <= set(below(code["level"]))
    assert sum(code["libraries"].values()) + len(code["missing"]) == len(LIBRARIES) - 1
    if not code["missing"]:
        kinds = [kind for entry in LIBRARIES.values() for kind in entry.kinds]
        assert code["functions"] == len(kinds)
    table = cli("info").stdout
    assert code["level"] in table
    assert code["digest"] in table


@pytest.mark.skipif(not is_x86(), reason="there is one level, the host's")
def test_info_at_lower_level_shows_that_level_and_same_digest():
    facts = [_in_a_process(level)["machine_code"] for level in ("x86-64", library.level())]
    assert facts[0]["level"] == "x86-64"
    assert set(facts[0]["libraries"]) <= {"x86-64"}
    if not facts[0]["missing"] + facts[1]["missing"]:
        # It is of the sources, which are the same.
        assert facts[0]["digest"] == facts[1]["digest"]


def test_info_at_unknown_level_exits_with_2():
    done = _run("x86-64-v9")
    assert done.returncode == 2
    assert "BACKNORM_CPU_LEVEL" in done.stderr
    assert done.stderr.count("\n") == 1


def test_info_without_machine_code_shows_no_level(cli, monkeypatch):
    def none():
        raise MachineCodeError("there is none")

    monkeypatch.setattr(library, "level", none)
    code = json.loads(cli("info", "--json").stdout)["machine_code"]
    assert (code["level"], code["libraries"], code["digest"]) == (None, {}, None)
    assert cli("info").exit_code == 0


def _in_a_process(level):
    done = _run(level)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _run(level):
    return subprocess.run(
        [sys.executable, "-m", "backnorm", "info", "--json"],
        env={**os.environ, "BACKNORM_CPU_LEVEL": level},
        capture_output=True,
        text=True,
        check=False,
    )
