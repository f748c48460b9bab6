"""A ReLU beside a batch normalisation: when both run in one pass, with the same bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from backnorm.errors import ArgumentError
from backnorm.graph import build_program, parse_graph, run_program

from .conftest import ATTRIBUTES, logical_tensor

SHAPES = {"NCX": [4, 3, 5, 2], "NXC": [4, 5, 2, 3]}
TYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
CHANNELS = range(2, 8)


def operator(id_, kind, inputs, outputs, attributes):
    return {
        "id": id_,
        "name": f"{kind}_{id_}",
        "kind": kind,
        "attrs": attributes,
        "inputs": inputs,
        "outputs": outputs,
    }


class Graph:
    """Operators on data tensors of one shape and type, and parameters with the ids 2 to 7."""

    def __init__(self, dtype="f32", data_format="NCX"):
        self.shape, self.dtype = SHAPES[data_format], dtype
        format_ = {"type": "string", "value": data_format}
        self.attributes = ATTRIBUTES | {"data_format": format_}
        self.operators = []

    def data(self, *ids):
        return [logical_tensor(id_, self.shape, self.dtype) for id_ in ids]

    def channels(self, *ids):
        return [logical_tensor(id_, [3]) for id_ in ids]

    def norm(self, kind, src, dst, *outputs):
        inputs = [*self.data(src), *self.channels(2, 3, 4, 5)]
        outputs = [*self.data(dst), *self.channels(*outputs)]
        self.add(kind, inputs, outputs, self.attributes)

    def relu(self, src, dst):
        self.add("ReLU", self.data(src), self.data(dst))

    def relu_backward(self, src, dy, dx, use_dst):
        attributes = {"use_dst": {"type": "bool", "value": use_dst}}
        self.add("ReLUBackward", self.data(src, dy), self.data(dx), attributes)

    def backward(self, src, dy, *outputs):
        inputs = [*self.data(src, dy), *self.channels(2, 3, 4)]
        outputs = [*self.data(outputs[0]), *self.channels(*outputs[1:])]
        self.add("BatchNormTrainingBackward", inputs, outputs, self.attributes)

    def add(self, kind, inputs, outputs, attributes=()):
        made = operator(len(self.operators), kind, inputs, outputs, dict(attributes))
        self.operators.append(made)

    def document(self, **more):
        return {"version": "3.0.0", "graph": self.operators} | more

    def arrays(self, rng, *ids):
        """Return normally distributed data for `ids`, some of it 0, and positive parameters."""
        made = {str(id_): rng.uniform(0.5, 1.5, 3).astype(np.float32) for id_ in CHANNELS}
        for id_ in ids:
            array = rng.normal(size=self.shape)
            array[rng.uniform(size=self.shape) < 0.1] = 0
            made[str(id_)] = array.astype(TYPES[self.dtype])
        return made


def titles(document):
    return [step.title for step in build_program(parse_graph(document)).steps]


def assert_same_bits(document, arrays, count):
    """Assert that `count` steps, and one step an operator, give the same bits."""
    graph = parse_graph(document)
    program = build_program(graph)
    assert len(program.steps) == count < len(graph.operators)
    used = [(*step.inputs.values(), *step.outputs.values()) for step in program.steps]
    assert set(program.tensors) == {key for keys in used for key in keys}
    fused = run_program(program, arrays)
    single = run_program(build_program(graph, fuse=False), arrays)
    assert list(fused) == list(single)
    for name, array in single.items():
        assert fused[name].dtype == array.dtype
        np.testing.assert_array_equal(
            fused[name].view(f"u{array.itemsize}"), array.view(f"u{array.itemsize}")
        )


@pytest.fixture
def inference():
    graph = Graph()
    graph.norm("BatchNormInference", 0, 10)
    graph.relu(10, 11)
    return graph


@pytest.mark.parametrize("data_format", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", ["BatchNormInference", "BatchNormForwardTraining"])
def test_relu_after_normalisation_is_fused_with_same_bits(rng, kind, dtype, data_format):
    graph = Graph(dtype, data_format)
    graph.norm(kind, 0, 10, *([20, 21, 22, 23] if "Training" in kind else []))
    graph.relu(10, 11)
    document = graph.document()
    assert titles(document) == [f"{kind} + ReLU"]
    assert_same_bits(document, graph.arrays(rng, 0), 1)


@pytest.mark.parametrize("data_format", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("use_dst", [0, 1])
@pytest.mark.parametrize("outputs", [(30,), (30, 31, 32)])
def test_relu_backward_before_diff_dst_is_fused_with_same_bits(
    rng, use_dst, dtype, data_format, outputs
):
    graph = Graph(dtype, data_format)
    graph.relu_backward(9, 1, 10, use_dst)
    graph.backward(0, 10, *outputs)
    document = graph.document()
    assert titles(document) == ["ReLUBackward + BatchNormTrainingBackward"]
    assert_same_bits(document, graph.arrays(rng, 0, 1, 9), 1)


def test_training_step_with_relu_is_fused_into_two_steps_with_same_bits(rng):
    graph = Graph()
    graph.norm("BatchNormForwardTraining", 0, 10, 20, 21, 22, 23)
    # Reads a statistic of the forward pass before its ReLU is listed.
    graph.backward(0, 12, 30, 31, 32)
    graph.operators[1]["inputs"][2] = logical_tensor(22, [3])
    graph.relu(10, 11)
    graph.relu_backward(11, 1, 12, 1)
    document = graph.document()
    assert titles(document) == [
        "BatchNormForwardTraining + ReLU",
        "ReLUBackward + BatchNormTrainingBackward",
    ]
    assert_same_bits(document, graph.arrays(rng, 0, 1), 2)


def test_fused_relu_backward_of_strided_operands_has_same_bits(rng):
    graph = Graph()
    graph.relu_backward(9, 1, 10, 0)
    graph.backward(0, 10, 30, 31, 32)
    for tensor in graph.operators[0]["inputs"] + graph.operators[1]["inputs"][:1]:
        tensor["stride"] = [30, 1, 6, 3]
    assert_same_bits(graph.document(), graph.arrays(rng, 0, 1, 9), 1)


def test_relu_of_tensor_that_is_an_output_is_not_fused(inference, rng):
    document = inference.document(output_ports=[10, 11])
    assert titles(document) == ["BatchNormInference", "ReLU"]
    results = run_program(build_program(parse_graph(document)), inference.arrays(rng, 0))
    assert list(results) == ["10", "11"]
    assert (results["10"] < 0).any()


def test_relu_of_tensor_with_two_readers_is_not_fused(inference):
    inference.relu(10, 12)
    assert titles(inference.document()) == ["BatchNormInference", "ReLU", "ReLU"]


def test_relu_backward_with_result_read_twice_is_not_fused():
    graph = Graph()
    graph.relu_backward(0, 1, 10, 0)
    graph.backward(10, 10, 30, 31, 32)
    assert titles(graph.document()) == ["ReLUBackward", "BatchNormTrainingBackward"]


def test_relu_of_graph_input_or_of_relu_is_not_fused(inference):
    inference.relu(11, 12)
    inference.relu(1, 13)
    assert titles(inference.document()) == ["BatchNormInference + ReLU", "ReLU", "ReLU"]


def test_relu_backward_before_src_is_not_fused_and_is_noted(rng):
    graph = Graph()
    graph.relu_backward(0, 1, 10, 0)
    graph.backward(10, 8, 30, 31, 32)
    program = build_program(parse_graph(graph.document()))
    assert [step.title for step in program.steps] == ["ReLUBackward", "BatchNormTrainingBackward"]
    (note,) = program.notes
    assert note.startswith("ReLUBackward_0 (ReLUBackward) feeds src of BatchNormTrainingBackward_1")
    assert "not the gradient of normalisation followed by ReLU" in note
    arrays = graph.arrays(rng, 0, 1, 8)
    src = np.where(arrays["0"] > 0, arrays["1"], 0)
    alone = Graph()
    alone.backward(0, 8, 30, 31, 32)
    expected = run_program(build_program(parse_graph(alone.document())), arrays | {"0": src})
    for name, array in run_program(program, arrays).items():
        assert array.tobytes() == expected[name].tobytes()


def test_relu_backward_before_diff_dst_has_no_note():
    graph = Graph()
    graph.relu_backward(0, 1, 10, 0)
    graph.backward(9, 10, 30, 31, 32)
    assert build_program(parse_graph(graph.document())).notes == ()


def test_fused_program_checks_declared_shape_of_intermediate_tensor(inference, rng):
    inference.operators[1]["outputs"][0]["shape"] = [-1]
    arrays = inference.arrays(rng, 0)
    program = build_program(parse_graph(inference.document()))
    assert len(program.steps) == 1
    assert run_program(program, arrays)["11"].shape == arrays["0"].shape
    wrong = {**arrays, "0": arrays["0"][:2]}
    for tensor in inference.operators[0]["inputs"][:1]:
        tensor["shape"] = [2, *tensor["shape"][1:]]
    with pytest.raises(ArgumentError, match="11: differs from the declared shape"):
        run_program(build_program(parse_graph(inference.document())), wrong)


def test_relu_backward_with_wrong_source_shape_raises_error_of_source(rng):
    graph = Graph()
    graph.relu_backward(9, 1, 10, 0)
    graph.backward(0, 10, 30, 31, 32)
    other = [4, 3, 5, 3]
    graph.operators[0]["inputs"][0] = logical_tensor(9, other)
    graph.operators[0]["outputs"][0] = logical_tensor(10, other)
    graph.operators[1]["inputs"][1] = logical_tensor(10, other)
    arrays = graph.arrays(rng, 0, 1) | {"9": np.ones(other, np.float32)}
    with pytest.raises(ArgumentError, match="9: must have the shape of src"):
        run_program(build_program(parse_graph(graph.document())), arrays)
