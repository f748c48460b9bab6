"""`backnorm info`."""

from __future__ import annotations

import json

import pytest

import backnorm
from backnorm.dialects import registry

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
    schema = json.loads(cli("info", dialect, op, "--json").stdout)["schema"]
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
    assert schema.to_dict() == facts["schema"]
    table = cli("info", dialect, op).stdout
    for entry in (*schema.inputs, *schema.outputs, *schema.attributes):
        assert entry.name in table


def test_info_shows_roles_for_both_values_of_flag(cli):
    roles = {"mean_out": "mean", "variance_out": "variance"}
    roles |= dict.fromkeys(("saved_mean", "saved_variance"), "ignored")
    options = "info", "paddle", "batch_norm_grad"
    assert json.loads(cli(*options, "--json").stdout)["frozen_roles"] == roles
    table = " ".join(cli(*options).stdout.split())
    assert "ignored in training, mean with constant statistics" in table


@pytest.mark.parametrize("arguments", [("caffe",), ("ngraph", "Relu"), ("", "")])
def test_info_rejects_unknown_names(refused, arguments):
    assert "unknown" in refused("info", *arguments)
