"""Tensors that `--random` makes up."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from backnorm.dialects import registry
from backnorm.dialects.random_tensors import random_tensors
from backnorm.errors import ArgumentError
from backnorm.graph.program import Tensor
from tests.support.calls import dialect_subjects

SCHEMA = registry.operator("onednn_graph", "BatchNormTrainingBackward").schema
PORTS = ("src", "diff_dst", "mean", "variance", "gamma")


def missing(*ports, shape=None, dtype=None):
    return {port: Tensor(port, (port,), shape if port == "src" else None, dtype) for port in ports}


def make(operands=None, seed=0, data_format="NXC", **wanted):
    operands = operands or {}
    wanted = missing(*(port for port in PORTS if port not in operands), **wanted)
    attributes = {"data_format": data_format, "epsilon": 1e-5}
    return random_tensors(SCHEMA, attributes, operands, wanted, seed)


def test_random_tensors_derive_all_shapes_from_one():
    made = make(shape=(4, 6, 5, 3))
    assert {port: array.shape for port, array in made.items()} == {
        "src": (4, 6, 5, 3),
        "diff_dst": (4, 6, 5, 3),
        "mean": (3,),
        "variance": (3,),
        "gamma": (3,),
    }
    assert {array.dtype for array in made.values()} == {np.dtype(np.float32)}


def test_random_tensors_take_channel_axis_from_data_format():
    assert make(shape=(4, 6, 5, 3), data_format="NCX")["mean"].shape == (6,)


@pytest.mark.parametrize("given_x", [True, False])
def test_random_statistics_equal_those_of_x(given_x, rng):
    x = rng.normal(5.0, 2.0, (4, 6, 5, 3)).astype(np.float32)
    made = make({"src": x}) if given_x else make(shape=x.shape)
    x = np.float64(x if given_x else made["src"])
    np.testing.assert_allclose(made["mean"], x.mean((0, 1, 2)), rtol=1e-6)
    np.testing.assert_allclose(made["variance"], x.var((0, 1, 2)), rtol=1e-6)


def test_random_variance_of_constant_x_is_one():
    made = make({"src": np.ones((4, 5, 3), np.float32)})
    assert made["variance"].tolist() == [1, 1, 1]


def test_random_dy_varies_and_means_of_x_differ_by_channel():
    made = make(shape=(8, 9, 9, 3))
    assert np.unique(made["diff_dst"]).size > 1000
    assert np.ptp(made["src"].mean((0, 1, 2))) > 0.1


def test_random_tensors_take_types_of_operator_and_operands():
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    made = make({"diff_dst": np.zeros((2, 5, 3), bfloat16)})
    assert (made["src"].dtype, made["mean"].dtype) == (bfloat16, np.float32)
    made = make({"diff_dst": np.zeros((2, 5, 3), bfloat16), "gamma": np.zeros(3, bfloat16)})
    assert (made["src"].dtype, made["mean"].dtype) == (bfloat16, bfloat16)
    schema = registry.operator("ngraph", "BatchNormInference").schema
    ports = {p: Tensor(p, (p,)) for p in ("gamma", "beta", "mean", "variance")}
    made = random_tensors(schema, {"epsilon": 1e-5}, {"input": np.zeros((2, 5, 3))}, ports, 0)
    assert {array.dtype for array in made.values()} == {np.dtype(np.float64)}
    assert made["mean"].shape == (5,)
    assert (made["variance"] > 0).all()


def test_random_tensors_repeat_for_same_seed_and_differ_for_another():
    first, again, other = (make(shape=(2, 5, 3), seed=seed) for seed in (1, 1, 2))
    for port in PORTS:
        assert first[port].tobytes() == again[port].tobytes()
        assert first[port].tobytes() != other[port].tobytes()


def test_random_tensors_keep_values_when_others_are_supplied():
    everything = make(shape=(2, 5, 3))
    rest = make({"gamma": everything["gamma"], "src": everything["src"]})
    for port, array in rest.items():
        assert array.tobytes() == everything[port].tobytes()


@pytest.mark.parametrize("shape", [(6, 5), (5,), ()])
def test_operands_of_different_ranks_are_rejected(refused, write_json, tmp_path, shape):
    np.savez(tmp_path / "in.npz", x=np.ones(shape), y_backprop=np.ones((6, 5, 4, 3), np.float32))
    document = {"dialect": "tensorflow", "op": "FusedBatchNormGradV3"}
    line = refused("run", write_json(document), "--tensors", tmp_path / "in.npz", "--random", 0)
    assert "error: x: " in line


def test_run_with_random_fills_missing_tensors_and_reports_them(
    cli, write_json, call, tmp_path, tensors
):
    np.savez(tmp_path / "x.npz", x=tensors["x"])
    file = write_json(call())
    result = cli("run", file, "--tensors", tmp_path / "x.npz", "--random", 7, "--check", "--json")
    assert result.exit_code == 0, result.output
    (step,) = json.loads(result.stdout)["steps"]
    assert [t["random"] for t in step["inputs"]] == [False, True, True, True, True]


def test_random_tensors_take_channel_axis_from_feature_index():
    schema = registry.operator("stablehlo", "batch_norm_grad").schema
    ports = {p: Tensor(p, (p,)) for p in ("scale", "mean", "variance", "grad_output")}
    x = np.arange(120.0).reshape(2, 3, 4, 5)

    def made_with(axis):
        attributes = {"feature_index": axis, "epsilon": 1e-5}
        return random_tensors(schema, attributes, {"operand": x}, ports, 0)

    for axis in range(4):
        made = made_with(axis)
        others = tuple(k for k in range(4) if k != axis)
        np.testing.assert_allclose(made["mean"], x.mean(others))
        np.testing.assert_allclose(made["variance"], x.var(others))
    # The operator rejects an axis that x does not have.
    assert made_with(4)["grad_output"].shape == x.shape
    for axis in (-1, "1", None):
        with pytest.raises(ArgumentError, match="feature_index"):
            made_with(axis)


def test_random_inverse_of_empty_x_is_positive():
    schema = registry.operator("onnxruntime", "BatchNormalizationGrad").schema
    ports = {"saved_inv_std": Tensor("saved_inv_std", ("saved_inv_std",))}
    made = random_tensors(schema, {}, {"X": np.empty((0, 50), np.float32)}, ports, 0)
    assert (made["saved_inv_std"] > 0).all()


@pytest.mark.parametrize("eps", [1e-5, 3.0])
def test_random_inverse_equals_that_of_x_with_epsilon_of_call(rng, eps):
    schema = registry.operator("aten", "native_batch_norm_backward").schema
    x = rng.normal(5.0, 2.0, (4, 3, 6))
    attributes = {"train": True, "eps": eps}
    made = random_tensors(schema, attributes, {"input": x}, {"save_invstd": Tensor("s", ("s",))}, 0)
    np.testing.assert_allclose(made["save_invstd"], 1 / np.sqrt(x.var((0, 2)) + eps))


@pytest.mark.parametrize("subject", [*dialect_subjects()], ids=lambda subject: subject.name)
def test_run_of_each_operator_on_random_tensors_passes_check(cli, write_json, subject):
    schema = subject.schema
    document = {
        "dialect": schema.dialect,
        "op": schema.op,
        "attributes": subject.attributes(),
        "shapes": {schema.words["x"]: subject.shape(4, 5, 2)},
    }
    result = cli("run", write_json(document), "--random", 0, "--check", "--json")
    assert result.exit_code == 0, result.output
    (step,) = json.loads(result.stdout)["steps"]
    assert all(grade["passed"] for grade in step["check"].values())
    assert step["check"]


def test_run_on_random_tensors_of_declared_shapes_passes_check(cli, write_json):
    document = {
        "dialect": "directml",
        "op": "BATCH_NORMALIZATION_TRAINING_GRAD",
        "attributes": {"Epsilon": 1e-5},
        "shapes": {"Input": [6, 4, 3, 5]}
        | {name: [1, 4, 1, 5] for name in ("Mean", "Variance", "Scale")},
    }
    result = cli("run", write_json(document), "--random", 0, "--check", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["passed"]
