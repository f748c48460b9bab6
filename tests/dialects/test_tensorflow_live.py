"""The dialect beside TensorFlow's own operator registry and forward."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from backnorm.dialects import tensorflow
from backnorm.dialects.registry import operators

pytestmark = [
    pytest.mark.peer,
    # It imports TensorFlow.
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
    ),
]

OPERATORS = operators("tensorflow")


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(0)
    channels = rng.uniform(0.5, 2, size=(4, 5)).astype("f")
    return {
        "x": rng.normal(2, 3, size=(4, 3, 3, 5)).astype("f"),
        **dict(zip(("scale", "offset", "mean", "variance"), channels, strict=True)),
    }


@pytest.fixture(scope="module")
def probe(tmp_path_factory, inputs):
    path = tmp_path_factory.mktemp("tensorflow") / "inputs.npz"
    np.savez(path, **inputs)
    script = Path(__file__).with_name("tensorflow_probe.py")
    done = subprocess.run(
        [sys.executable, str(script), str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("op", OPERATORS)
def test_schema_has_names_types_and_defaults_of_tensorflow(probe, op):
    theirs, schema = probe["ops"][op], OPERATORS[op].schema
    assert [t.name for t in schema.inputs] == [name for name, _ in theirs["inputs"]]
    assert [t.name for t in schema.outputs] == [name for name, _ in theirs["outputs"]]
    for ours, (_, symbol) in zip(schema.inputs, theirs["inputs"], strict=True):
        # Types without a symbol are float32 there.
        assert ours.type == (symbol or "float32") or (symbol == "T" and ours.type == "float32")
    assert [rule.data for rule in schema.type_rules] == theirs["types"]
    attributes = {a.name: a for a in schema.attributes}
    assert list(attributes["data_format"].choices) == theirs["formats"]
    for name, default in theirs["defaults"].items():
        ours = attributes[name].default
        assert np.float32(ours) == np.float32(default) if name == "epsilon" else ours == default


def test_forward_matches_tensorflow(probe, inputs):
    for options, theirs in probe["forward"]:
        ours = tensorflow.FusedBatchNormV3(**inputs, **options)
        for name, values in theirs.items():
            if name == "reserve_space_3":
                continue
            np.testing.assert_allclose(
                getattr(ours, name), np.array(values, "f"), rtol=2e-5, atol=2e-5,
                err_msg=f"{name} with {options}",
            )  # fmt: skip
