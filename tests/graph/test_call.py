"""The call document becomes a program of one step."""

from __future__ import annotations

import numpy as np
import pytest

from backnorm.graph.call import parse_call


def test_parse_call_without_inputs_names_required_and_omits_optional_ones():
    program = parse_call({"dialect": "onednn_graph", "op": "BatchNormTrainingBackward"})
    assert dict(program.steps[0].inputs) == {
        "src": "src",
        "diff_dst": "diff_dst",
        "mean": "mean",
        "variance": "variance",
    }
    assert list(program.results) == ["diff_src", "diff_gamma", "diff_beta"]


def test_parse_call_orders_inputs_as_operator_does():
    inputs = {"variance": "v", "input": "a", "delta": "d", "mean": "m", "gamma": "g", "beta": "b"}
    program = parse_call({"dialect": "ngraph", "op": "BatchNormTrainingBackprop", "inputs": inputs})
    assert list(program.steps[0].inputs) == [
        "input",
        "gamma",
        "beta",
        "mean",
        "variance",
        "delta",
    ]


def test_parse_call_of_older_operator_has_its_inputs():
    document = {"dialect": "onednn_spec", "op": "BatchNormTrainingBackprop_early"}
    assert "input" in parse_call(document).steps[0].inputs


def test_parse_call_requests_required_outputs_that_are_not_written():
    program = parse_call(
        {"dialect": "tensorflow", "op": "FusedBatchNormGradV3", "outputs": {"scale_backprop": "g"}}
    )
    assert list(program.results) == ["g"]
    assert len(program.steps[0].outputs) == 5


def test_parse_call_requests_updated_statistics_only_with_the_old_ones():
    document = {"dialect": "aten", "op": "native_batch_norm"}
    assert list(parse_call(document).results) == ["out", "save_mean", "save_invstd"]
    old = {"running_mean": "m", "running_var": "v"}
    program = parse_call(document | {"inputs": old})
    assert list(program.results)[3:] == ["running_mean_out", "running_var_out"]
    with pytest.raises(ValueError, match=r"outputs: unknown key; got 'running_mean_out'"):
        parse_call(document | {"outputs": ["out", "running_mean_out"]})


def test_parse_call_sets_declared_shapes_and_types():
    program = parse_call(
        {
            "dialect": "ngraph",
            "op": "BatchNormTraining",
            "inputs": {"input": "a"},
            "shapes": {"input": [2, 0, 3]},
            "types": {"input": "bfloat16"},
        }
    )
    tensor = program.tensors["a"]
    assert tensor.shape == (2, 0, 3)
    assert str(tensor.dtype) == "bfloat16"


def test_parse_call_accepts_tensor_used_as_two_inputs():
    program = parse_call(
        {
            "dialect": "ngraph",
            "op": "BatchNormTraining",
            "inputs": {"gamma": "ones", "beta": "ones"},
            "types": {"gamma": "float16"},
        }
    )
    assert program.inputs == ("input", "ones")
    assert program.tensors["ones"].dtype == np.float16
