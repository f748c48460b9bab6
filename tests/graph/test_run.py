"""Programs built from graphs: names of tensors, results, what a run refuses."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

import backnorm
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph import build_program, load_graph, parse_graph, run_program

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
    return run_program(build_program(parse_graph(document)), tensors)


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
    program = build_program(parse_graph(training_step))
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


def test_inference_graph_has_bits_of_batch_norm_inference(backward, by_id, arrays, tensor):
    backward["graph"][0] |= {
        "kind": "BatchNormInference",
        "inputs": [tensor(0, [4, 3, 2, 2]), *(tensor(i, [3]) for i in (4, 8, 2, 3))],
        "outputs": [tensor(9, [4, 3, 2, 2])],
    }
    beta = by_id["8"] = np.float32([1, -1, 0.5])
    expected = backnorm.batch_norm_inference(
        arrays["x"], arrays["mean"], arrays["variance"], arrays["gamma"], beta, epsilon=EPSILON
    )
    assert run(backward, by_id)["9"].tobytes() == expected.tobytes()


def test_backward_graph_of_bfloat16_data_has_bits_of_backward(backward, by_id, arrays):
    for which in ((0, "inputs"), (1, "inputs"), (0, "outputs")):
        backward["graph"][0][which[1]][which[0]]["dtype"] = "bf16"
    half = {n: arrays[n].astype(ml_dtypes.bfloat16) for n in ("x", "dy")}
    results = run(backward, by_id | {"0": half["x"], "1": half["dy"]})
    assert_gradients(results, backnorm.batch_norm_backward(**arrays | half, epsilon=EPSILON))


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


def test_supply_lays_out_tensor_in_declared_order(backward, by_id):
    from backnorm.graph.run import supply

    backward["graph"][0]["inputs"][0]["stride"] = STRIDES["channels last"]
    program = build_program(parse_graph(backward))
    laid_out = supply(program, "0", by_id["0"])
    np.testing.assert_array_equal(laid_out, by_id["0"])
    assert [s // 4 for s in laid_out.strides] == STRIDES["channels last"]


def test_parse_graph_accepts_stride_zero_of_axis_of_length_one(backward, by_id, tensor):
    backward["graph"][0]["inputs"][0] = tensor(0, [4, 3, 4, 1], stride=[12, 4, 1, 0])
    parse_graph(backward)


@pytest.mark.parametrize("empty", [(0, 3, 2, 2), (4, 3, 0, 2)])
def test_backward_graph_of_empty_tensors_returns_zeros(backward, by_id, empty):
    for key, i in (("inputs", 0), ("inputs", 1), ("outputs", 0)):
        backward["graph"][0][key][i]["shape"] = list(empty)
    nothing = np.empty(empty, np.float32)
    results = run(backward, by_id | {"0": nothing, "1": nothing})
    assert results["5"].shape == empty
    assert results["6"].tolist() == results["7"].tolist() == [0, 0, 0]


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
