"""Programs built from graphs: names of tensors, results, what a run refuses."""

from __future__ import annotations

import json

import numpy as np
import pytest

import backnorm
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph import load_graph, parse_graph, run_program

from .conftest import logical_tensor

EPSILON = float(np.float32(1e-5))


@pytest.fixture
def arrays(rng):
    x = rng.normal(1.0, 2.0, (4, 3, 2, 2)).astype(np.float32)
    return {
        "x": x,
        "dy": rng.normal(size=x.shape).astype(np.float32),
        "mean": x.mean((0, 2, 3)),
        "variance": x.var((0, 2, 3)),
        "gamma": rng.uniform(0.5, 1.5, 3).astype(np.float32),
    }


@pytest.fixture
def by_id(arrays):
    return {str(i): array for i, array in enumerate(arrays.values())}


@pytest.fixture
def expected(arrays):
    return backnorm.batch_norm_backward(**arrays, epsilon=EPSILON)


def run(document, tensors):
    return run_program(parse_graph(document), tensors)


def assert_gradients(results, expected, names=("5", "6", "7")):
    assert list(results) == list(names)
    for name, array in zip(names, expected, strict=True):
        assert results[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_run_program_with_tensors_by_id_has_bits_of_backward(backward, by_id, expected):
    assert_gradients(run(backward, by_id), expected)


@pytest.mark.parametrize("prefix", ["", "bn."])
def test_run_program_with_tensors_by_port_has_bits_of_backward(backward, arrays, expected, prefix):
    ports = ("src", "diff_dst", "mean", "variance", "gamma")
    tensors = {prefix + port: a for port, a in zip(ports, arrays.values(), strict=True)}
    assert_gradients(run(backward, tensors), expected)


def test_run_program_with_tensors_by_name_has_bits_of_backward(backward, by_id, expected):
    backward["graph"][0]["inputs"][0]["name"] = "activations"
    backward["graph"][0]["outputs"][0]["name"] = "gradient"
    by_id["activations"] = by_id.pop("0")
    assert_gradients(run(backward, by_id), expected, ("gradient", "6", "7"))


def test_port_name_of_two_tensors_is_not_an_alias(training_step):
    program = parse_graph(training_step)
    # Both operators have a src (the same tensor) and a mean (not the same).
    assert "src" in program.tensors["0"].aliases
    assert not any("mean" in tensor.aliases for tensor in program.tensors.values())
    assert "forward.mean" in program.tensors["2"].aliases


def test_run_program_with_one_tensor_under_two_names_raises_value_error(backward, by_id):
    with pytest.raises(ArgumentValueError, match="src: is another name of '0'"):
        run(backward, by_id | {"src": by_id["0"]})


def test_run_program_of_training_step_has_bits_of_forward_and_backward(
    training_step, arrays, expected
):
    tensors = {
        "0": arrays["x"],
        "1": arrays["dy"],
        "2": np.zeros(3, np.float32),
        "3": np.ones(3, np.float32),
        "4": arrays["gamma"],
        "8": np.zeros(3, np.float32),
    }
    results = run(training_step, tensors)
    # What nothing consumes: the gradients, dst and the running statistics.
    assert set(results) == {"5", "6", "7", "21", "22", "23"}
    forward = backnorm.batch_norm_forward(
        arrays["x"], arrays["gamma"], tensors["8"], epsilon=EPSILON
    )
    gradients = backnorm.batch_norm_backward(
        arrays["x"],
        arrays["dy"],
        forward.mean,
        forward.variance,
        arrays["gamma"],
        epsilon=EPSILON,
    )
    assert results["21"].tobytes() == forward.y.tobytes()
    for name, array in zip("567", gradients, strict=True):
        assert results[name].tobytes() == array.tobytes()


def test_output_ports_select_and_order_results(training_step, by_id):
    training_step["output_ports"] = [24, 5, 24]
    by_id |= {"8": by_id["4"]}
    assert list(run(training_step, by_id)) == ["24", "5"]


def test_backward_graph_with_one_output_ignores_gamma(backward, by_id, arrays):
    backward["graph"][0]["outputs"] = backward["graph"][0]["outputs"][:1]
    arrays = arrays | {"gamma": None}
    expected = backnorm.batch_norm_backward(**arrays, epsilon=EPSILON)
    assert_gradients(run(backward, by_id), expected[:1], ("5",))


def test_backward_graph_without_gamma_has_bits_of_backward(backward, by_id, arrays):
    backward["graph"][0]["inputs"].pop()
    expected = backnorm.batch_norm_backward(**arrays | {"gamma": None}, epsilon=EPSILON)
    assert_gradients(run(backward, by_id), expected)


STRIDES = {
    "dense": [12, 4, 2, 1],
    "channels last": [12, 1, 6, 3],
    "batch inside": [1, 4, 24, 12],
    "padded": [100, 20, 6, 2],
}


@pytest.mark.parametrize("name", STRIDES)
def test_declared_strides_do_not_change_results(backward, by_id, expected, name):
    backward["graph"][0]["inputs"][0]["stride"] = STRIDES[name]
    assert_gradients(run(backward, by_id), expected)


def test_run_program_lays_out_tensor_in_declared_order(backward, by_id):
    backward["graph"][0]["inputs"][0]["stride"] = STRIDES["channels last"]
    seen = {}

    def watch(step, inputs, call):
        seen.update(inputs)
        return call()

    run_program(parse_graph(backward), by_id, watch=watch)
    np.testing.assert_array_equal(seen["src"], by_id["0"])
    assert [s // 4 for s in seen["src"].strides] == STRIDES["channels last"]


def test_run_program_with_watch_returns_what_watch_returns(training_step, by_id):
    seen = []

    def watch(step, inputs, call):
        seen.append((step.label, set(inputs)))
        return {port: array + 1 for port, array in call().items()}

    program, tensors = parse_graph(training_step), by_id | {"8": by_id["4"]}
    plain = run_program(program, tensors)
    watched = run_program(program, tensors, watch=watch)
    assert [label for label, _ in seen] == ["forward", "bn"]
    assert seen[1][1] == {"src", "diff_dst", "mean", "variance", "gamma"}
    assert list(watched) == list(plain)
    np.testing.assert_array_equal(watched["21"], plain["21"] + 1)


def test_run_program_asks_fill_for_missing_inputs_of_each_step(training_step, by_id):
    requests = []

    def fill(step, inputs, missing):
        requests.append((step.label, set(inputs), list(missing)))
        return {port: by_id[tensor.key] for port, tensor in missing.items()}

    program, tensors = parse_graph(training_step), by_id | {"8": by_id["4"]}
    supplied = {key: array for key, array in tensors.items() if key not in "14"}
    filled = run_program(program, supplied, fill=fill)
    assert requests == [
        ("forward", {"src", "mean", "variance", "beta"}, ["gamma"]),
        ("bn", {"src", "mean", "variance", "gamma"}, ["diff_dst"]),
    ]
    for name, array in run_program(program, tensors).items():
        assert filled[name].tobytes() == array.tobytes()


def test_parse_graph_accepts_stride_zero_of_axis_of_length_one(backward, by_id, tensor):
    backward["graph"][0]["inputs"][0] = tensor(0, [4, 3, 4, 1], stride=[12, 4, 1, 0])
    parse_graph(backward)


def test_run_program_with_missing_tensors_raises_error_with_their_names(backward, by_id):
    del by_id["1"], by_id["3"]
    with pytest.raises(ArgumentValueError, match="missing: 1, 3"):
        run(backward, by_id)


def test_run_program_with_wrong_tensor_shape_or_type_raises_error_of_tensor(backward, by_id):
    with pytest.raises(ArgumentValueError, match="0: differs from the declared shape"):
        run(backward, by_id | {"0": by_id["0"][:2]})
    with pytest.raises(ArgumentTypeError, match="2: differs from the declared data type"):
        run(backward, by_id | {"2": by_id["2"].astype(np.float64)})


def test_load_graph_of_file_equals_parse_graph_of_its_document(tmp_path, backward):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(backward))
    assert load_graph(path) == parse_graph(backward)


def relu_step(training_step, source):
    """Add a ReLU after the forward pass, and a ReLUBackward before the `source` of the backward."""
    shape = [4, 3, 2, 2]
    backward, forward = training_step["graph"]
    position = ("src", "diff_dst").index(source)
    backward["inputs"][position] = logical_tensor(31, shape)
    tensors = {id_: logical_tensor(id_, shape) for id_ in (1, 21, 30, 31)}
    relu = {"id": 30, "kind": "ReLU", "inputs": [tensors[21]], "outputs": [tensors[30]]}
    relu_backward = {"id": 31, "kind": "ReLUBackward"}
    relu_backward |= {"inputs": [tensors[30], tensors[1]], "outputs": [tensors[31]]}
    return {"version": "3.0.0", "graph": [backward, relu_backward, relu, forward]}


def test_training_step_with_relu_has_bits_of_forward_relu_and_backward(training_step, arrays):
    program = parse_graph(relu_step(training_step, "diff_dst"))
    assert [step.op for step in program.steps] == [
        "BatchNormForwardTraining", "ReLU", "ReLUBackward", "BatchNormTrainingBackward",
    ]  # fmt: skip
    assert program.notes == ()
    x, dy, gamma = (arrays[name] for name in ("x", "dy", "gamma"))
    beta = np.float32([0.5, -1, 0])
    ones = np.ones(3, np.float32)
    tensors = {"0": x, "1": dy, "2": ones, "3": ones, "4": gamma, "8": beta}
    results = run_program(program, tensors)
    forward = backnorm.batch_norm_forward(x, gamma, beta, epsilon=EPSILON)
    passed = np.where(forward.y > 0, dy, np.float32(0))
    gradients = backnorm.batch_norm_backward(
        x, passed, forward.mean, forward.variance, gamma, epsilon=EPSILON
    )
    for name, array in zip("567", gradients, strict=True):
        assert results[name].tobytes() == array.tobytes()


def test_relu_backward_before_src_of_backward_is_noted(training_step):
    (note,) = parse_graph(relu_step(training_step, "src")).notes
    assert note.startswith("ReLUBackward (ReLUBackward) feeds src of bn, as in oneDNN's own")
    assert "not the gradient of normalisation followed by ReLU" in note
