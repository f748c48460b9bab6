"""`backnorm info`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import backnorm
from backnorm.dialects import registry
from backnorm.errors import MachineCodeError
from backnorm_kernels import library
from backnorm_kernels.kinds import LIBRARIES
from backnorm_kernels.levels import below, is_x86

OPERATORS = [(d, op) for d in registry.DIALECTS for op in registry.operators(d)]


def test_info_shows_versions_threads_and_dialects(cli):
    facts = json.loads(cli("info", "--json").stdout)
    assert facts["versions"]["backnorm"] == backnorm.__version__
    assert facts["versions"]["ml_dtypes"]
    assert facts["threads"] == backnorm.get_num_threads()
    assert facts["machine"]["threads"] >= 1
    assert set(facts["dialects"]) == {*registry.DIALECTS, *registry.PARTS}
    table = cli("info").stdout
    assert facts["machine"]["name"] in table
    assert "FusedBatchNormGradV3" in table


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


@pytest.mark.parametrize("dialect", {**registry.DIALECTS, **registry.PARTS})
def test_info_of_dialect_lists_operators_and_functions(cli, dialect):
    known = [*(registry.operators(dialect) if dialect in registry.DIALECTS else ())]
    known += registry.parts(dialect)
    facts = json.loads(cli("info", dialect, "--json").stdout)
    assert [entry["op"] for entry in facts["operators"]] == known
    table = cli("info", dialect).stdout
    assert all(op in table for op in known)


@pytest.mark.parametrize(("dialect", "op"), [(d, op) for d in registry.PARTS
                                             for op in registry.parts(d)])  # fmt: skip
def test_info_of_function_shows_its_rules(cli, dialect, op):
    (schema,) = json.loads(cli("info", dialect, op, "--json").stdout)["schemas"]
    assert schema == registry.parts(dialect)[op].to_dict()
    table = cli("info", dialect, op).stdout
    assert all(tensor["name"] in table for tensor in schema["inputs"])


def test_info_of_unknown_function_exits_with_2(cli):
    result = cli("info", "cann", "BNInfer")
    assert result.exit_code == 2
    assert "op: unknown operator of cann; got 'BNInfer'; expected BNTr" in result.stderr


def test_info_of_unknown_name_lists_accepted_names(cli):
    known = ", ".join([*registry.operators("aten"), *registry.parts("aten")])
    assert (
        f"op: unknown operator of aten; got 'no'; expected {known}"
        in cli("info", "aten", "no").stderr
    )
    assert ", mpsgraph, cann" in cli("info", "no").stderr


@pytest.mark.parametrize(("dialect", "op"), OPERATORS)
def test_info_of_operator_shows_its_schema(cli, dialect, op):
    schema = registry.operator(dialect, op).schema
    facts = json.loads(cli("info", dialect, op, "--json").stdout)
    assert schema.to_dict() in facts["schemas"]
    table = cli("info", dialect, op).stdout
    for entry in (*schema.inputs, *schema.outputs, *schema.attributes):
        assert entry.name in table


def test_info_shows_roles_for_both_values_of_flag(cli):
    roles = {"mean_out": "mean", "variance_out": "variance"}
    roles |= dict.fromkeys(("saved_mean", "saved_variance"), "ignored")
    options = "info", "paddle", "batch_norm_grad"
    assert json.loads(cli(*options, "--json").stdout)["frozen_roles"] == [roles]
    table = " ".join(cli(*options).stdout.split())
    assert "ignored in training, mean with constant statistics" in table


def test_info_shows_all_revisions(cli):
    facts = json.loads(cli("info", "onednn_spec", "BatchNormTrainingBackprop", "--json").stdout)
    assert {s["revision"] for s in facts["schemas"]} == {"latest", "2020-21", "early"}


@pytest.mark.parametrize("arguments", [("caffe",), ("ngraph", "Relu"), ("", "")])
def test_info_rejects_unknown_names(refused, arguments):
    assert "unknown" in refused("info", *arguments)
