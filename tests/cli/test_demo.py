"""`backnorm demo`: the whole run, its data, and that it can fail."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from backnorm import engines
from backnorm.cli import demo
from backnorm.cli.demo import LAYERS, cases, read_layers
from backnorm.dialects.registry import DIALECTS, operators


def test_demo_in_own_process_passes_in_all_dialects_and_types():
    process = subprocess.run(
        [sys.executable, "-m", "backnorm", "demo", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, "")
    report = json.loads(process.stdout)
    assert report["passed"] is True
    combinations = {(row["dialect"], row["layout"], row["dtype"]) for row in report["rows"]}
    backward = [
        next(op.schema for op in operators(name).values() if op.schema.operation == "backward")
        for name in DIALECTS
    ]
    assert {dialect for dialect, _, _ in combinations} == set(DIALECTS)
    types = sum(len(schema.type_rules) for schema in backward)
    assert len(combinations) == len(report["rows"]) == 2 * types
    assert {dtype for _, _, dtype in combinations} == {"float32", "bfloat16", "float16", "float64"}
    for row in report["rows"]:
        assert row["passed"]
        assert row["seconds"] > 0
        assert row["gigabytes_per_second"] > 0
        assert row["worst_ulp"] > 0
        assert row["worst_gradient"] in ("dx", "dgamma", "dbeta")
        assert row["judged"] == 9
        assert 0 < row["budget_used"] <= 1
    assert all(a["agree"] and a["compared"] > 0 for a in report["agreements"])


def test_demo_prints_engine_verdict_and_a_row_per_type(cli, monkeypatch):
    monkeypatch.setattr(demo, "LAYERS", LAYERS[-1:])
    result = cli("demo")
    assert result.exit_code == 0
    # Each call has three gradients on the layer.
    count = 3 * len(list(cases()))
    engine, verdict, *_ = result.stdout.splitlines()
    assert engine == f"Engine: {engines.summary()}"
    assert verdict.startswith(f"PASSED: {count} gradients equal the exact ones")
    calls = 2 * len(DIALECTS)
    judged = f"{3 * calls} of {3 * calls}"
    assert re.search(rf"float32 +{len(DIALECTS)} +{calls} +{judged} +yes", result.stdout)
    assert "ulp" not in result.stdout


def test_demo_with_details_prints_a_row_per_call(cli, engine, monkeypatch):
    monkeypatch.setattr(demo, "LAYERS", LAYERS[:1])
    lines = cli("demo", "--details").stdout.splitlines()
    assert lines[1].startswith("PASSED: ")
    calls = [line for line in lines if line.strip().startswith(tuple(DIALECTS))]
    assert len(calls) == len(list(cases()))
    # The largest error of float16 is in a gradient of float32, and is named.
    names = {re.search(r" (dx|dgamma|dbeta) ", line)[1] for line in calls}
    assert names == {"dx", "dgamma" if engine == "kernels" else "dbeta"}


def perturbed(cases_to_spoil, factor):
    """Return a `cases` whose chosen cases hand back a result that is slightly off."""

    def spoiled():
        for case in cases():
            if (case.schema.dialect, case.layout, str(case.dtype)) in cases_to_spoil:
                yield Spoiled(case, factor)
            else:
                yield case

    return spoiled


class Spoiled:
    def __init__(self, case, factor):
        self._case = case
        self._factor = factor

    def __getattr__(self, name):
        return getattr(self._case, name)

    def of_layer(self, layer):
        case = self._case.of_layer(layer)
        gamma = case.data.gamma * case.data.gamma.dtype.type(self._factor)
        return replace(case, data=replace(case.data, gamma=gamma))


@pytest.mark.long
def test_demo_with_disagreeing_dialect_fails(cli, monkeypatch):
    # The oracle accepts the result, which is right for its own inputs; the others differ.
    spoiled = perturbed({("ngraph", "NCX", "float32")}, 1.0001)
    monkeypatch.setattr(demo, "cases", spoiled)
    result = cli("demo", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["passed"] is False
    agree = {a["dtype"]: a["agree"] for a in report["agreements"]}
    assert agree == {"float32": False, "bfloat16": True, "float16": True, "float64": True}
    assert all(row["passed"] for row in report["rows"])
    table = cli("demo").stdout
    assert table.splitlines()[1].startswith("FAILED: ")
    assert re.search(r"float32 .* NO ", table)
    assert re.search(r"bfloat16 .* yes ", table)


@pytest.mark.long
def test_demo_with_wrong_result_fails(cli, monkeypatch):
    right = demo.timed

    def wrong(call, repeat):
        outputs, seconds = right(call, 1)
        first = next(iter(outputs))
        return outputs | {first: outputs[first] * outputs[first].dtype.type(1.01)}, seconds

    monkeypatch.setattr(demo, "timed", wrong)
    result = cli("demo")
    assert result.exit_code == 1
    assert "FAILED" in result.stdout


@pytest.fixture(scope="module")
def layers():
    return read_layers()


def test_read_layers_returns_two_spatial_and_one_dense_layer(layers):
    assert tuple(layers) == LAYERS
    assert layers["conv8"]["x"].shape[2:] == (8, 8)
    assert layers["conv4"]["x"].shape[2:] == (4, 4)
    assert layers["dense"]["x"].ndim == 2


@pytest.mark.parametrize("name", LAYERS)
def test_read_layers_returns_tensors_of_training_step(layers, name):
    layer = layers[name]
    axes = tuple(i for i in range(layer["x"].ndim) if i != 1)
    wide = np.float64(layer["x"])
    np.testing.assert_array_equal(layer["mean"], wide.mean(axes).astype(np.float32))
    np.testing.assert_array_equal(layer["variance"], wide.var(axes).astype(np.float32))
    assert layer["dy"].shape == layer["x"].shape
    # A ReLU follows each layer, so about half of the gradients are zero; the others vary.
    assert 0.3 < (layer["dy"] == 0).mean() < 0.7
    assert np.unique(layer["dy"]).size > 1000
    assert np.isfinite(layer["dy"]).all()


def test_demo_data_is_at_most_1_mib():
    data = resources.files("backnorm") / "data/digits_batchnorm.npz"
    with resources.as_file(data) as path:
        assert path.stat().st_size <= 2**20
