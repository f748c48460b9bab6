"""Bad input to `backnorm run`: one clear line on stderr, exit status 2, nothing written."""

from __future__ import annotations

import os

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "an object"),
        ("null", "null"),
        ("{}", "neither a oneDNN graph nor a call"),
        ('{"dialect": "ngraph", "dialect": "ngraph"}', "occurs twice"),
        ('{"dialect": "ngraph", "epsilon": NaN}', "NaN"),
        ('{"dialect": "ngraph", "epsilon": -Infinity}', "Infinity"),
        ('{"dialect": "ngraph", "epsilon": 1e999}', "too large"),
        ('{"dialect": "ngraph", "epsilon": 1' + "0" * 5000 + "}", "not acceptable JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"dialect": 1}', "dialect"),
        ('{"dialect": "caffe", "op": "BatchNorm"}', "unknown dialect"),
        ('{"dialect": "ngraph", "op": "Relu"}', "unknown operator of ngraph"),
        ('{"dialect": "ngraph", "op": "BatchNormTraining", "input": {}}', "unknown key"),
        ('{"dialect": "ngraph", "op": "BatchNormTraining", "inputs": {"y": "x"}}', "unknown key"),
        ('{"dialect": "ngraph", "op": "BatchNormTraining", "inputs": []}', "a list"),
        ('{"dialect": "ngraph", "op": "BatchNormTraining", "inputs": {"input": ""}}', "name"),
        ('{"dialect": "ngraph", "op": "BatchNormTraining", "outputs": ["z"]}', "unknown key"),
        (
            '{"dialect": "ngraph", "op": "BatchNormTraining", '
            '"outputs": {"normalized": "a", "batch_mean": "a"}}',
            "one name",
        ),
        ('{"dialect": "ngraph", "op": "BatchNormTraining", "shapes": {"z": [1]}}', "unknown key"),
        (
            '{"dialect": "ngraph", "op": "BatchNormTraining", "shapes": {"input": [-1, 2]}}',
            "out of range",
        ),
        (
            '{"dialect": "ngraph", "op": "BatchNormTraining", "types": {"input": "int8"}}',
            "unsupported element type",
        ),
        ('{"dialect": "ngraph", "op": "\\ud800"}', "unknown operator"),
        (
            '{"dialect": "onednn_spec", "op": "BatchNormInference", '
            '"attributes": {"revision": ["latest"]}}',
            "revision",
        ),
    ],
)
def test_a_bad_program_file(refused, write_json, npz, text, says):
    assert says in refused("run", write_json(text), "--tensors", npz)


def test_a_program_that_is_not_utf8(refused, tmp_path):
    path = tmp_path / "latin.json"
    path.write_bytes('{"dialect": "é"}'.encode("latin-1"))
    assert "UTF-8" in refused("run", path)


def test_a_program_that_is_too_large(refused, tmp_path):
    path = tmp_path / "large.json"
    with path.open("wb") as stream:
        stream.truncate(2**30)
    assert "too large" in refused("run", path)


def test_paths_that_are_not_files(refused, write_json, npz, call, tmp_path):
    file = write_json(call())
    pipe = tmp_path / "pipe.npz"
    os.mkfifo(pipe)
    assert "no such file" in refused("run", tmp_path / "none.json")
    assert "not a regular file" in refused("run", tmp_path)
    assert "no such file" in refused("run", file, "--tensors", tmp_path / "none.npz")
    # A pipe would block for ever.
    assert "not a regular file" in refused("run", file, "--tensors", pipe)
    assert "not a regular file" in refused("run", file, "--tensors", npz, "--out", pipe)
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    assert "not a regular file" in refused("run", file, "--tensors", folder)
    assert "not a regular file" in refused("run", file, "--tensors", npz, "--out", folder)


def test_unknown_extensions(refused, write_json, npz, call, tmp_path):
    file = write_json(call())
    assert "unknown kind of tensor file" in refused("run", file, "--tensors", file)
    assert "'.npy'" in refused("run", file, "--tensors", npz, "--out", tmp_path / "out.npy")
    assert "''" in refused("run", file, "--tensors", npz, "--out", tmp_path / "out")


def test_a_result_file_in_a_folder_that_does_not_exist(refused, write_json, npz, call, tmp_path):
    line = refused("run", write_json(call()), "--tensors", npz, "--out", tmp_path / "no" / "o.npz")
    assert "folder does not exist" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write everything")
def test_permissions(refused, write_json, npz, call, tmp_path):
    file = write_json(call())
    npz.chmod(0)
    assert "Permission denied" in refused("run", file, "--tensors", npz)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "not writable" in refused("run", file, "--out", closed / "out.npz")


def test_system_errors_and_lack_of_memory_are_one_line(refused, write_json, npz, call, monkeypatch):
    file = write_json(call())
    for error, says in (
        (PermissionError(13, "Permission denied", str(npz)), "Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "not enough memory"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr("backnorm.cli.run.open_tensors", fail)
        assert says in refused("run", file, "--tensors", npz)


def test_missing_tensors_are_all_named(refused, write_json, call, tmp_path, tensors):
    path = tmp_path / "some.npz"
    np.savez(path, x=tensors["x"], mean=tensors["mean"])
    line = refused("run", write_json(call()), "--tensors", path)
    assert "missing tensors: dy, variance, gamma" in line
    assert "--random" in line
    assert "--tensors" in refused("run", write_json(call()))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"attributes": {}}, "epsilon"),
        ({"attributes": {"epsilon": "1e-5"}}, "epsilon"),
        ({"attributes": {"epsilon": [1e-5]}}, "epsilon"),
        ({"attributes": {"epsilon": -1.0}}, "epsilon"),
        ({"attributes": {"epsilon": 1e-5, "data_format": {}}}, "data_format"),
        ({"attributes": {"epsilon": 1e-5, "axis": 1}}, "axis"),
        # NXC by default: the 5 values per channel meet a last axis of 3.
        ({"attributes": {"epsilon": 1e-5}}, "mean"),
        ({"inputs": {"src": "x", "diff_dst": "mean"}}, "diff_dst"),
        ({"outputs": ["diff_src", "diff_gamma"]}, "diff_beta"),
        ({"shapes": {"src": [6, 5, 4, 4]}}, "differs from the declared shape"),
        ({"types": {"src": "float64"}}, "differs from the declared data type"),
    ],
)
def test_what_the_operator_refuses(refused, write_json, npz, call, tmp_path, changes, says):
    out = tmp_path / "out.npz"
    line = refused("run", write_json(call(**changes)), "--tensors", npz, "--out", out)
    assert says in line
    assert not out.exists()


def test_variance_that_is_negative(refused, write_json, call, tmp_path, tensors):
    path = tmp_path / "negative.npz"
    np.savez(path, **tensors | {"variance": -tensors["variance"]})
    assert "variance + epsilon must be positive" in refused(
        "run", write_json(call()), "--tensors", path
    )


@pytest.mark.parametrize(
    "options",
    [("--threads", "0"), ("--threads", "x"), ("--repeat", "0"), ("--random", "-1"), ("--nope",)],
)
def test_bad_options(cli, write_json, call, options):
    assert cli("run", write_json(call()), *options).exit_code == 2
