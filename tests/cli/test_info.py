"""`backnorm info`."""

from __future__ import annotations

import json

import pytest

import backnorm
from backnorm.dialects import registry

OPERATORS = [(d, op) for d in registry.DIALECTS for op in registry.operators(d)]


def test_the_installation(cli):
    facts = json.loads(cli("info", "--json").stdout)
    assert facts["versions"]["backnorm"] == backnorm.__version__
    assert facts["versions"]["numba"]
    assert facts["threads"] == backnorm.get_num_threads()
    assert facts["machine"]["threads"] >= 1
    assert set(facts["cache"]) == {"folder", "files", "bytes"}
    assert set(facts["dialects"]) == set(registry.DIALECTS)
    table = cli("info").stdout
    assert facts["machine"]["name"] in table
    assert "FusedBatchNormGradV3" in table


def test_an_empty_cache_is_no_error(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("BACKNORM_CACHE_DIR", str(tmp_path / "none"))
    assert json.loads(cli("info", "--json").stdout)["cache"]["files"] == 0


@pytest.mark.parametrize("dialect", registry.DIALECTS)
def test_a_dialect_lists_its_operators(cli, dialect):
    facts = json.loads(cli("info", dialect, "--json").stdout)
    assert [entry["op"] for entry in facts["operators"]] == list(registry.operators(dialect))
    table = cli("info", dialect).stdout
    assert all(op in table for op in registry.operators(dialect))


@pytest.mark.parametrize(("dialect", "op"), OPERATORS)
def test_an_operator_shows_its_schema(cli, dialect, op):
    schema = registry.operator(dialect, op).schema
    facts = json.loads(cli("info", dialect, op, "--json").stdout)
    assert schema.to_dict() in facts["schemas"]
    table = cli("info", dialect, op).stdout
    for entry in (*schema.inputs, *schema.outputs, *schema.attributes):
        assert entry.name in table


def test_every_revision_is_shown(cli):
    facts = json.loads(cli("info", "onednn_spec", "BatchNormTrainingBackprop", "--json").stdout)
    assert {s["revision"] for s in facts["schemas"]} == {"latest", "2020-21", "early"}


@pytest.mark.parametrize("arguments", [("caffe",), ("ngraph", "Relu"), ("", "")])
def test_what_is_unknown(refused, arguments):
    assert "unknown" in refused("info", *arguments)
