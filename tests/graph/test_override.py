"""Overrides in benchdnn's words: --in-shapes, --dt and --op-attrs."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backnorm.dialects.schema import ELEMENT_TYPE_NAMES
from backnorm.graph import override_graph, parse_graph, run_program

from .conftest import attribute, logical_tensor


@pytest.fixture
def graph(backward):
    return parse_graph(backward)


def overridden(graph, **texts):
    return override_graph(graph, **texts)


def test_override_graph_without_texts_returns_equal_graph(graph):
    assert override_graph(graph) == graph


@pytest.mark.parametrize(
    ("text", "shape", "stride"),
    [
        ("0:2x5", (2, 5), (5, 1)),
        ("0:2x3x4x5", (2, 3, 4, 5), (60, 20, 5, 1)),
        ("0:2x3x4x5*abcd", (2, 3, 4, 5), (60, 20, 5, 1)),
        ("0:2x3x4x5*acdb", (2, 3, 4, 5), (60, 1, 15, 3)),
        ("0:2x3x4x5*100x30x7x1", (2, 3, 4, 5), (100, 30, 7, 1)),
        ("0:*acdb", (4, 3, 2, 2), (12, 1, 6, 3)),
        ("0:*24x8x4x2", (4, 3, 2, 2), (24, 8, 4, 2)),
        ("0:0x3x4", (0, 3, 4), (12, 4, 1)),
        ("1:7x3+0:2x5", (2, 5), (5, 1)),
    ],
)
def test_in_shapes_override_sets_shape_and_stride(graph, text, shape, stride):
    tensor = overridden(graph, in_shapes=text).tensors["0"]
    assert (tensor.shape, tensor.stride) == (shape, stride)


def test_in_shapes_override_keeps_other_inputs_and_clears_output_shapes(graph):
    changed = overridden(graph, in_shapes="0:2x3x7+1:2x3x7")
    assert changed.tensors["2"].shape == (3,)
    assert [changed.tensors[key].shape for key in changed.results] == [None] * 3
    made = {"0": np.ones((2, 3, 7)), "1": np.ones((2, 3, 7)), **dict.fromkeys("234", np.ones(3))}
    arrays = {name: array.astype(np.float32) for name, array in made.items()}
    results = run_program(changed, arrays)
    assert results["5"].shape == (2, 3, 7)


def test_dt_override_changes_type_of_data_tensors_only(graph):
    changed = overridden(graph, dt="bf16")
    types = {id_: tensor.dtype for id_, tensor in changed.tensors.items()}
    for id_ in (0, 1, 5):
        assert types[str(id_)] == ml_dtypes.bfloat16
    for id_ in (2, 3, 4, 6, 7):
        assert types[str(id_)] == np.float32


def test_dt_override_by_id_changes_type_of_these_tensors_only(graph):
    before = {id_: tensor.dtype for id_, tensor in graph.tensors.items()}
    changed = overridden(graph, dt="0:bf16+1:bf16+5:bf16")
    types = {id_: tensor.dtype for id_, tensor in changed.tensors.items()}
    assert types == before | dict.fromkeys("015", np.dtype(ml_dtypes.bfloat16))
    changed = override_graph(quantised(), dt="1:u8")
    assert changed.tensors["1"].dtype == np.uint8


@pytest.mark.parametrize("name", ["f32", "bf16", "f16"])
def test_dt_override_of_graph_with_relu_sets_one_type_for_data_tensors(graph, backward, name):
    backward["graph"].append(
        {
            "id": 11,
            "name": "relu",
            "kind": "ReLUBackward",
            "inputs": [logical_tensor(8, [4, 3, 2, 2]), logical_tensor(9, [4, 3, 2, 2])],
            "outputs": [logical_tensor(1, [4, 3, 2, 2])],
        }
    )
    changed = overridden(parse_graph(backward), dt=name)
    expected = ELEMENT_TYPE_NAMES[name]
    assert [changed.tensors[str(id_)].dtype for id_ in (0, 1, 5, 8, 9)] == [expected] * 5


def test_op_attrs_override_parses_value_by_type_of_attribute(graph):
    (step,) = overridden(graph, op_attrs="10:data_format:NXC*epsilon:0.0625").steps
    assert step.attributes == {"data_format": "NXC", "epsilon": 0.0625}


def quantised():
    return parse_graph(
        {
            "version": "3.0.0",
            "graph": [
                {
                    "id": 3,
                    "kind": "Quantize",
                    "attrs": {"scales": attribute("f32[]", [1.0])},
                    "inputs": [logical_tensor(0, [2, 3])],
                    "outputs": [logical_tensor(1, [2, 3], "s8")],
                }
            ],
        }
    )


def test_op_attrs_override_parses_lists_and_integers():
    text = "3:scales:5e-1*zps:-2*qtype:per_tensor*axis:-1"
    (step,) = override_graph(quantised(), op_attrs=text).steps
    assert step.attributes == {"scales": [0.5], "zps": [-2]}


@pytest.mark.parametrize(
    ("text", "value"), [("0", False), ("1", True), ("true", True), ("false", False)]
)
def test_op_attrs_override_parses_booleans(backward, text, value):
    backward["graph"][0] |= {
        "kind": "ReLUBackward",
        "attrs": {},
        "inputs": backward["graph"][0]["inputs"][:2],
        "outputs": backward["graph"][0]["outputs"][:1],
    }
    graph = parse_graph(backward)
    assert overridden(graph, op_attrs=f"10:use_dst:{text}").steps[0].attributes == {
        "use_dst": value
    }


@given(st.permutations(range(4)), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_in_shapes_override_by_tag_equals_override_by_strides(order, shape):
    graph = quantised()
    tag = "".join("abcd"[axis] for axis in order)
    sizes = "x".join(map(str, shape))
    tagged = override_graph(graph, in_shapes=f"0:{sizes}*{tag}").tensors["0"]
    numbers = "x".join(map(str, tagged.stride))
    assert override_graph(graph, in_shapes=f"0:{sizes}*{numbers}").tensors["0"] == tagged
    array = np.empty([shape[axis] for axis in order], np.int8).transpose(np.argsort(order))
    assert array.shape == tuple(shape)
    assert array.strides == tagged.stride
