"""oneDNN Graph JSON: what is read, and what is refused, by place."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from backnorm.graph import parse_graph


def put(document, path, value):
    """Set the value at a path of keys and indices; "del" as value deletes it."""
    *way, last = path
    for key in way:
        document = document[key]
    if value == "del":
        del document[last]
    else:
        document[last] = value


INPUT = ("graph", 0, "inputs", 0)
OUTPUT = ("graph", 0, "outputs", 0)


def test_parse_graph_reads_operators_and_tensors(backward):
    program = parse_graph(backward)
    (step,) = program.steps
    assert (step.id, step.label) == (10, "bn")
    assert step.op == "BatchNormTrainingBackward"
    assert step.attributes == {"epsilon": 1e-5, "data_format": "NCX"}
    assert list(step.inputs.items()) == [
        ("src", "0"), ("diff_dst", "1"), ("mean", "2"), ("variance", "3"), ("gamma", "4"),
    ]  # fmt: skip
    assert list(step.outputs.values()) == list(program.results) == ["5", "6", "7"]
    tensor = program.tensors["0"]
    assert (tensor.shape, tensor.stride, tensor.dtype) == ((4, 3, 2, 2), (12, 4, 2, 1), np.float32)


def test_parse_graph_ignores_keys_of_newer_versions(backward):
    backward |= {"version": "3.9.1", "fpmath_mode_apply_to_int": "false", "input_ports": [0]}
    assert parse_graph(backward) == parse_graph(backward | {"version": "3.0.0"})


def test_parse_graph_reads_bf16_and_f16_types(backward):
    for tensor in backward["graph"][0]["inputs"]:
        tensor["dtype"] = "bf16"
    graph = parse_graph(backward)
    assert graph.tensors["0"].dtype == ml_dtypes.bfloat16
    put(backward, (*INPUT, "dtype"), "f16")
    assert parse_graph(backward).tensors["0"].dtype == np.float16


@pytest.mark.parametrize("shape", [[-1, 3, 2, 2], [-1], [-(2**63), 3, 2, 2]])
def test_parse_graph_with_unknown_output_shape_sets_shape_none(backward, shape):
    put(backward, (*OUTPUT, "shape"), shape)
    put(backward, (*OUTPUT, "stride"), [-(2**63)] * len(shape))
    tensor = parse_graph(backward).tensors["5"]
    assert (tensor.shape, tensor.stride) == (None, None)


def test_unknown_shape_is_taken_from_another_mention_of_tensor(training_step):
    mention = training_step["graph"][1]["outputs"][3]
    mention |= {"shape": [-1], "stride": [-1], "layout_type": "any"}
    assert parse_graph(training_step).tensors["24"].shape == (3,)


@pytest.mark.parametrize("layout_type", ["any", "undef"])
def test_parse_graph_with_layout_any_or_undef_sets_stride_none(backward, layout_type):
    put(backward, (*INPUT, "layout_type"), layout_type)
    assert parse_graph(backward).tensors["0"].stride is None


def with_unknown(document):
    """Add a MatMul that reads the data gradient, and one that makes x, tensor 0."""
    document["graph"] += [
        {"id": 30, "kind": "MatMul", "inputs": [{"id": 5}], "outputs": [{"id": 40}]},
        {"id": 31, "kind": "MatMul", "inputs": [{"id": 41}, {"id": 42}], "outputs": [{"id": 0}]},
        {"id": 32, "kind": "End", "inputs": [{"id": 40}], "outputs": []},
    ]
    return document


def test_parse_graph_of_known_operators_equals_graph_without_the_others(backward):
    alone = parse_graph(backward)
    graph = parse_graph(with_unknown(backward), only_known=True)
    assert graph.notes == ("left out 3 operators: MatMul (2), End (1)",)
    assert replace(graph, notes=()) == alone
    assert graph.inputs == ("0", "1", "2", "3", "4")


def test_graph_of_known_operators_returns_tensors_that_others_read(training_step):
    alone = parse_graph(training_step)
    assert not {"24", "25"} & set(alone.results)
    training_step["graph"].append(
        {"id": 30, "kind": "Sqrt", "inputs": [{"id": 25}], "outputs": [{"id": 40}]}
    )
    graph = parse_graph(training_step, only_known=True)
    assert set(graph.results) == {*alone.results, "25"}
    training_step["output_ports"] = [5, 40]
    assert list(parse_graph(training_step, only_known=True).results) == ["5", "25"]


def test_older_operator_name_is_parsed_as_present_name(backward):
    put(backward, ("graph", 0, "kind"), "BatchNormTrainingBackprop")
    del backward["graph"][0]["name"]
    (step,) = parse_graph(backward).steps
    assert step.op == step.label == "BatchNormTrainingBackward"


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        ("f32", 1),
        ("s64", 3),
        ("bool", 1),
        ("bool", False),
        ("string", "a"),
        ("f32[]", [1, 2.5]),
        ("s64[]", []),
    ],
)
def test_attribute_value_is_accepted_in_its_declared_type(backward, type_, value):
    put(backward, ("graph", 0, "attrs", "a"), {"type": type_, "value": value})
    assert parse_graph(backward).steps[0].attributes["a"] == value
