"""Bad input to `backnorm run`: one clear line on stderr, exit status 2, nothing written."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"dialect": "ngraph", "epsilon": 1' + "0" * 5000 + "}", "not acceptable JSON"),
        ("[" * 100_000, "maximum recursion depth"),
        ('{"a":' * 100_000, "maximum recursion depth"),
    ],
)
def test_run_of_file_beyond_limits_of_json_parser_prints_one_line(refused, write_json, text, says):
    assert says in refused("run", write_json(text))


def test_program_that_is_not_utf8_is_rejected(refused, tmp_path):
    path = tmp_path / "latin.json"
    path.write_bytes('{"dialect": "é"}'.encode("latin-1"))
    assert "can't decode byte" in refused("run", path)


def test_run_names_unreadable_paths(refused, write_json, tmp_path):
    file = write_json({"dialect": "ngraph", "op": "BatchNormInference"})
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    for suffix in (".npz", ".safetensors"):
        missing = tmp_path / f"none{suffix}"
        line = refused("run", file, "--tensors", missing)
        assert line.endswith(f"{missing}: No such file or directory")
    assert f"{folder}: Is a directory" in refused("run", file, "--tensors", folder)
    assert f"{tmp_path}: Is a directory" in refused("run", tmp_path)
    long = tmp_path / f"{'a' * 252}.npz"
    assert "File name too long" in refused("run", file, "--tensors", long)


def test_run_rejects_unwritable_out_before_reading_tensors(
    refused, write_json, npz, call, tmp_path, monkeypatch
):
    monkeypatch.setattr("backnorm.cli.run.read_tensors", lambda *_: pytest.fail("work was done"))
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "device.npz").symlink_to("/dev/full")
    for name, says in (
        ("folder.npz", "is not a regular file"),
        ("device.npz", "is not a regular file"),
        ("none/out.npz", "its folder does not exist"),
        ("program.json/out.npz", "its folder does not exist"),
        ("out.npy", "unknown kind of tensor file; got extension '.npy'"),
        ("out", "unknown kind of tensor file; got extension ''"),
        (f"{'a' * 252}.npz", "File name too long"),
    ):
        out = tmp_path / name
        line = refused("run", write_json(call()), "--tensors", npz, "--out", out)
        assert f"{out}: {says}" in line


def test_run_accepts_out_with_name_of_maximal_length(cli, write_json, npz, call, tmp_path):
    out = tmp_path / f"{'a' * 251}.npz"
    result = cli("run", write_json(call()), "--tensors", npz, "--out", out, "--repeat", 1)
    assert result.exit_code == 0, result.output
    assert out.exists()


def test_run_of_empty_array_with_huge_dimension_passes(cli, write_json):
    attributes = {"epsilon": 1e-5, "data_format": "NCX"}
    document = {"dialect": "onednn_spec", "op": "BatchNormTrainingBackprop"}
    document |= {"attributes": attributes, "shapes": {"input_forward": [2**44, 2, 0, 5]}}
    result = cli("run", write_json(document), "--random", 1, "--check")
    assert result.exit_code == 0, result.output


def test_run_escapes_undecodable_file_names(cli, refused, call, npz, tmp_path):
    odd = os.fsdecode(b"\xff\x1b[31m")
    file, out = tmp_path / f"{odd}.json", tmp_path / f"{odd}.npz"
    assert "\\udcff\\x1b[31m.json: No such file" in refused("run", file)
    file.write_text(json.dumps(call()))
    for option in ((), ("--json",)):
        result = cli("run", file, "--tensors", npz, "--out", out, "--repeat", 1, *option)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
    assert out.exists()


@pytest.mark.parametrize("array", [np.ones((2, 3), np.int64), np.array([["a", "b"]])])
def test_run_rejects_unsupported_element_types(refused, write_json, call, tmp_path, tensors, array):
    np.savez(tmp_path / "in.npz", **tensors | {"x": array})
    line = refused("run", write_json(call()), "--tensors", tmp_path / "in.npz")
    assert "src: unsupported element type" in line


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read and write everything")
def test_run_without_permissions_is_rejected(refused, write_json, npz, call, tmp_path):
    file = write_json(call())
    npz.chmod(0)
    assert "Permission denied" in refused("run", file, "--tensors", npz)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    assert "not writable" in refused("run", file, "--out", closed / "out.npz")


def test_run_reports_system_and_memory_errors_in_one_line(
    refused, write_json, npz, call, monkeypatch
):
    file = write_json(call())
    for error, says in (
        (PermissionError(13, "Permission denied", str(npz)), "Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (MemoryError(), "not enough memory"),
    ):

        def fail(*_, error=error):
            raise error

        monkeypatch.setattr("backnorm.cli.run.read_tensors", fail)
        assert says in refused("run", file, "--tensors", npz)


def test_run_names_all_missing_tensors(refused, write_json, call, tmp_path, tensors):
    path = tmp_path / "some.npz"
    np.savez(path, x=tensors["x"], mean=tensors["mean"])
    line = refused("run", write_json(call()), "--tensors", path)
    assert "missing tensors: dy, variance, gamma" in line
    assert "--random" in line
    assert "--tensors" in refused("run", write_json(call()))


def test_run_of_operands_rejected_by_operator_writes_nothing(
    refused, write_json, npz, call, tmp_path
):
    out = tmp_path / "out.npz"
    # NXC by default: the 5 values per channel meet a last axis of 3.
    file = write_json(call(attributes={"epsilon": 1e-5}))
    assert "mean: " in refused("run", file, "--tensors", npz, "--out", out)
    assert not out.exists()
