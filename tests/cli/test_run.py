"""`backnorm run` on calls: results, report, exit status."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import backnorm
from backnorm.graph import run as run_module

EPSILON = 1e-5
ROOT = Path(__file__).parents[2]


@pytest.fixture
def expected(tensors):
    epsilon = float(np.float32(EPSILON))
    return backnorm.batch_norm_backward(**tensors, epsilon=epsilon, data_format="NCX")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_run_writes_gradients_of_backward(
    cli, read_npz, write_json, npz, call, tmp_path, expected, suffix
):
    names = zip(("diff_src", "diff_gamma", "diff_beta"), expected._fields, strict=True)
    file, out = write_json(call(outputs=dict(names))), tmp_path / f"out{suffix}"
    result = cli("run", file, "--tensors", npz, "--out", out, "--check", "--repeat", 1)
    assert result.exit_code == 0, result.output
    assert "BatchNormTrainingBackward" in result.stdout
    written = load_file(out) if suffix == ".safetensors" else read_npz(out)
    assert sorted(written) == ["dbeta", "dgamma", "dx"]
    for name, array in expected._asdict().items():
        assert written[name].tobytes() == array.tobytes()


@pytest.mark.parametrize(("axis", "layout"), [(0, "axis 0"), (1, "NCX"), (2, "axis 2"), (3, "NXC")])
def test_report_of_a_call_with_a_channel_axis_names_its_layout(cli, write_json, axis, layout):
    document = {
        "dialect": "stablehlo",
        "op": "batch_norm_grad",
        "attributes": {"epsilon": 1e-5, "feature_index": axis},
        "shapes": {"operand": [2, 3, 4, 5]},
    }
    result = cli("run", write_json(document), "--random", 0, "--check", "--json")
    assert result.exit_code == 0, result.output
    (step,) = json.loads(result.stdout)["steps"]
    assert step["layout"] == layout


def test_json_report_has_expected_fields(cli, write_json, npz, call):
    result = cli("run", write_json(call()), "--tensors", npz, "--check", "--json", "--threads", 1)
    report = json.loads(result.stdout)
    assert set(report) == {"file", "threads", "repeat", "steps", "written", "passed", "notes"}
    assert (report["threads"], report["passed"], report["written"]) == (1, True, None)
    (step,) = report["steps"]
    assert set(step) == {
        "dialect",
        "op",
        "label",
        "layout",
        "arithmetic",
        "inputs",
        "outputs",
        "seconds",
        "gigabytes_per_second",
        "worst_ulp",
        "budget_used",
        "check",
    }
    assert (step["dialect"], step["layout"]) == ("onednn_graph", "NCX")
    assert step["arithmetic"] == "float64"
    assert step["inputs"][0] == {
        "port": "src",
        "name": "x",
        "shape": [6, 5, 4, 3],
        "dtype": "float32",
        "random": False,
    }
    assert [t["port"] for t in step["outputs"]] == ["diff_src", "diff_gamma", "diff_beta"]
    # Five passes over arrays of 6 * 5 * 4 * 3 floats.
    assert step["gigabytes_per_second"] * step["seconds"] == pytest.approx(5 * 360 * 4 / 1e9)
    assert 0 < step["worst_ulp"] <= 0.51
    assert set(step["check"]) == {"diff_src", "diff_gamma", "diff_beta"}
    assert all(verdict["passed"] for verdict in step["check"].values())


def test_run_without_check_reports_no_verdict(cli, write_json, npz, call):
    report = json.loads(cli("run", write_json(call()), "--tensors", npz, "--json").stdout)
    assert report["steps"][0]["check"] is None
    assert report["steps"][0]["worst_ulp"] is None


@pytest.mark.parametrize("name", ["float32", "float64"])
def test_run_with_arithmetic_computes_in_that_type(cli, write_json, npz, call, name, engine):
    command = ("run", write_json(call()), "--tensors", npz, "--check", "--json")
    result = cli(*command, "--arithmetic", name)
    assert result.exit_code == 0, result.output
    (step,) = json.loads(result.stdout)["steps"]
    assert step["arithmetic"] == name
    # Half an ulp, and what an element near to zero has lost in float32. NumPy's engine computes in
    # float64.
    assert (step["worst_ulp"] > 0.6) == (name == "float32" and engine == "kernels")


@pytest.mark.parametrize("json_option", [(), ("--json",)])
def test_check_of_wrong_result_fails(cli, write_json, npz, call, monkeypatch, json_option):
    right = run_module.run_step

    def wrong(program, step, inputs, arithmetic):
        outputs = right(program, step, inputs, arithmetic)
        outputs["diff_gamma"] = outputs["diff_gamma"] * np.float32(1.00001)
        return outputs

    monkeypatch.setattr(run_module, "run_step", wrong)
    file = write_json(call())
    result = cli("run", file, "--tensors", npz, "--check", *json_option)
    assert result.exit_code == 1
    assert "check failed: BatchNormTrainingBackward diff_gamma" in result.stderr
    if json_option:
        report = json.loads(result.stdout)
        assert report["passed"] is False
        assert report["steps"][0]["check"]["diff_gamma"]["passed"] is False
        assert report["steps"][0]["check"]["diff_src"]["passed"] is True
    else:
        assert "FAILED" in result.stdout


def test_json_report_of_nan_result_is_valid(cli, write_json, npz, call, monkeypatch):
    right = run_module.run_step
    monkeypatch.setattr(
        run_module, "run_step", lambda *a: {k: v * np.float32("nan") for k, v in right(*a).items()}
    )
    result = cli("run", write_json(call()), "--tensors", npz, "--check", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["steps"][0]["worst_ulp"] == "inf"


def test_run_of_bfloat16_writes_same_bits_to_both_kinds_of_file(
    cli, read_npz, write_json, tensors, tmp_path, call
):
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in tensors.items()}
    np.savez(tmp_path / "in.npz", **halves)
    file = write_json(call())
    first, second = tmp_path / "out.npz", tmp_path / "out.safetensors"
    for out in (first, second):
        result = cli("run", file, "--tensors", tmp_path / "in.npz", "--out", out, "--check")
        assert result.exit_code == 0, result.output
        assert "bfloat16" in result.stdout
    by_numpy, by_safetensors = read_npz(first), load_file(second)
    for name in ("diff_src", "diff_gamma"):
        assert by_numpy[name].dtype == np.dtype("V2")
        assert by_safetensors[name].dtype == ml_dtypes.bfloat16
        assert by_numpy[name].tobytes() == by_safetensors[name].tobytes()


def test_run_does_not_request_unlisted_optional_outputs(
    cli, read_npz, write_json, npz, tmp_path, call
):
    out = tmp_path / "out.npz"
    cli("run", write_json(call(outputs=["diff_src"])), "--tensors", npz, "--out", out)
    with_gamma = read_npz(npz)
    epsilon = float(np.float32(EPSILON))
    arrays = {name: with_gamma[name] for name in ("x", "dy", "mean", "variance")}
    # The guide: with neither diff_gamma nor diff_beta, gamma is ignored.
    expected = backnorm.batch_norm_backward(**arrays, epsilon=epsilon).dx
    written = read_npz(out)
    assert list(written) == ["diff_src"]
    assert written["diff_src"].tobytes() == expected.tobytes()


def test_run_accepts_output_with_name_of_input(
    cli, read_npz, write_json, npz, tmp_path, call, expected
):
    out = tmp_path / "out.npz"
    outputs = {"diff_src": "x", "diff_gamma": "gamma", "diff_beta": "beta"}
    result = cli("run", write_json(call(outputs=outputs)), "--tensors", npz, "--out", out)
    assert result.exit_code == 0, result.output
    assert read_npz(out)["x"].tobytes() == expected.dx.tobytes()


def test_run_with_out_equal_to_input_file_overwrites_it(
    cli, read_npz, write_json, npz, call, expected
):
    file = write_json(call(outputs={"diff_src": "dx", "diff_gamma": "a", "diff_beta": "b"}))
    result = cli("run", file, "--tensors", npz, "--out", npz)
    assert result.exit_code == 0, result.output
    assert read_npz(npz)["dx"].tobytes() == expected.dx.tobytes()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("example", ["graph_training_step", "call_random"])
def test_run_with_random_writes_file_that_runs_again(cli, read_npz, tmp_path, example, suffix):
    file = ROOT / "docs" / "examples" / f"{example}.json"
    golden, again = tmp_path / f"golden{suffix}", tmp_path / f"again{suffix}"
    read = read_npz if suffix == ".npz" else load_file
    assert cli("run", file, "--random", 3, "--out", golden).exit_code == 0
    assert cli("run", file, "--tensors", golden, "--out", again).exit_code == 0
    first, second = read(golden), read(again)
    assert len(first) > len(second) > 0
    for name, array in second.items():
        assert array.tobytes() == first[name].tobytes()


def test_run_with_random_also_writes_inputs_that_it_read(
    cli, read_npz, write_json, tensors, tmp_path, call
):
    source, out = tmp_path / "in.npz", tmp_path / "out.npz"
    np.savez(source, x=tensors["x"])
    result = cli("run", write_json(call()), "--tensors", source, "--random", 0, "--out", out)
    assert result.exit_code == 0, result.output
    assert read_npz(out)["x"].tobytes() == tensors["x"].tobytes()


def test_run_with_random_and_output_with_name_of_input_is_refused(
    refused, write_json, npz, tmp_path, call
):
    out = tmp_path / "out.npz"
    file = write_json(call(outputs={"diff_src": "x"}))
    line = refused("run", file, "--tensors", npz, "--random", 0, "--out", out)
    assert "outputs: must differ from the names of inputs" in line
    assert not out.exists()


def test_escape_sequences_in_names_do_not_reach_the_terminal(cli, write_json, npz, call):
    document = call(op="Batch\x1b[31mNorm [bold]")
    result = cli("run", write_json(document), "--tensors", npz)
    assert result.exit_code == 2
    assert "\x1b" not in result.output
    assert "[bold]" in result.stderr
