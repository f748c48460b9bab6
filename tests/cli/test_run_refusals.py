"""Bad input to `backnorm run`: one clear line on stderr, exit status 2, nothing written."""

from __future__ import annotations

import json
import os
import struct
import zipfile

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
            '{"dialect": "ngraph", "op": "BatchNormTraining", "shapes": {"input": [true, 2]}}',
            "a boolean",
        ),
        (
            '{"dialect": "ngraph", "op": "BatchNormTraining", "shapes": {"input": [2e0, 2]}}',
            "the number 2.0",
        ),
        (
            '{"dialect": "ngraph", "op": "BatchNormTraining", "shapes": {"input": [1'
            + "0" * 40
            + "]}}",
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


@pytest.mark.parametrize("end", ["/", "//", "/.", "/..", "/./"])
def test_paths_with_the_end_of_a_folder_are_refused(
    refused, write_json, npz, call, tmp_path, monkeypatch, end
):
    """`Path` drops such an end; the file of the shorter name is not what was asked for."""
    monkeypatch.chdir(tmp_path)
    file = write_json(call())
    says = "must be the path of a file, not of a folder"
    for arguments in (
        (f"{file}{end}", "--tensors", npz),
        (file, "--tensors", f"{npz}{end}"),
        (file, "--tensors", npz, "--out", f"out.npz{end}"),
    ):
        assert says in refused("run", *arguments)
    assert not (tmp_path / "out.npz").exists()


def test_paths_without_a_name_are_refused(refused, write_json, npz, call):
    file = write_json(call())
    for name in ("", ".", "..", "/"):
        for option in ("--tensors", "--out"):
            line = refused("run", file, "--tensors", npz, option, name)
            assert f"{name or repr(name)}: must be the path of a file" in line


@pytest.mark.parametrize("folder", ["missing/..", "program.json/..", "missing/../missing"])
def test_out_through_a_missing_folder_is_refused(
    refused, write_json, npz, call, tmp_path, monkeypatch, folder
):
    monkeypatch.chdir(tmp_path)
    line = refused("run", write_json(call()), "--tensors", npz, "--out", f"{folder}/out.npz")
    assert "folder does not exist" in line
    assert not (tmp_path / "out.npz").exists()


HUGE = 2**48
EMPTY = [[HUGE, 0, HUGE], [0, HUGE, HUGE], [0, 0, HUGE, HUGE], [HUGE] * 3, [2**25, 0, 2**24]]


@pytest.mark.parametrize("layout", ["NCX", "NXC"])
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize(
    ("op", "port"),
    [
        ("BatchNormTrainingBackprop", "input_forward"),
        ("BatchNormForwardTraining", "input"),
        ("BatchNormInference", "input"),
    ],
)
def test_shapes_that_no_array_can_have(refused, write_json, op, port, shape, layout):
    """NumPy cannot have every empty array: the other dimensions count, too."""
    attributes = {"epsilon": 1e-5, "data_format": layout}
    document = {"dialect": "onednn_spec", "op": op, "attributes": attributes}
    file = write_json(document | {"shapes": {port: shape}})
    assert f"shapes.{port}: has too many elements" in refused("run", file, "--random", 1)


@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_of_arrays_that_cannot_be(refused, write_json, tmp_path, shape, suffix):
    path = tmp_path / f"in{suffix}"
    if suffix == ".npz":
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {tuple(shape)}}}".encode()
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x.npy", b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text)
    else:
        fields = {"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}
        text = json.dumps(fields).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text)
    document = {"dialect": "ngraph", "op": "BatchNormInference", "inputs": {"input": "x"}}
    line = refused("run", write_json(document), "--tensors", path)
    assert "[x]: has too many elements" in line or "contradicts the amount of data" in line


@pytest.mark.parametrize("shape", [[HUGE, 1, 0], [2**46, 3, 0], [2**44, 2, 0, 5]])
@pytest.mark.parametrize(
    ("op", "port"),
    [
        ("BatchNormTrainingBackprop", "input_forward"),
        ("BatchNormForwardTraining", "input"),
        ("BatchNormInference", "input"),
    ],
)
def test_an_endless_array_of_nothing_is_done_at_once(cli, write_json, op, port, shape):
    attributes = {"epsilon": 1e-5, "data_format": "NCX"}
    document = {"dialect": "onednn_spec", "op": op, "attributes": attributes}
    file = write_json(document | {"shapes": {port: shape}})
    result = cli("run", file, "--random", 1, "--check")
    assert result.exit_code == 0, result.output


def test_names_that_are_long(cli, refused, write_json, npz, call, tmp_path, read_npz):
    """A name may have 255 bytes, and needs no room for more; one that is longer is refused."""
    file = write_json(call())
    for name in ("a" * 251, "é" * 125):
        out = tmp_path / f"{name}.npz"
        result = cli("run", file, "--tensors", npz, "--out", out, "--repeat", 1)
        assert result.exit_code == 0, result.output
        assert "diff_src" in read_npz(out)
    for name in ("a" * 252, "é" * 126):
        long = tmp_path / f"{name}.npz"
        assert "File name too long" in refused("run", file, "--tensors", npz, "--out", long)
        assert "File name too long" in refused("run", file, "--tensors", long)
        assert "File name too long" in refused("run", long)
    deep = tmp_path.joinpath(*["folder"] * 1000, "out.npz")
    assert "File name too long" in refused("run", file, "--tensors", npz, "--out", deep)


def test_a_long_name_is_refused_before_the_work(refused, write_json, npz, call, tmp_path):
    long = tmp_path / f"{'a' * 300}.npz"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("backnorm.cli.run.open_tensors", lambda *_: pytest.fail("work was done"))
        refused("run", write_json(call()), "--tensors", npz, "--out", long)


def test_names_that_are_not_text(cli, refused, call, npz, tmp_path):
    odd = os.fsdecode(b"\xff\x1b[31m")
    file, out = tmp_path / f"{odd}.json", tmp_path / f"{odd}.npz"
    assert "\\udcff\\x1b[31m.json: no such file" in refused("run", file)
    file.write_text(json.dumps(call()))
    for option in ((), ("--json",)):
        result = cli("run", file, "--tensors", npz, "--out", out, "--repeat", 1, *option)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
    assert out.exists()


def test_links(cli, refused, write_json, npz, call, tmp_path, read_npz):
    file = write_json(call())
    links = {name: tmp_path / f"{name}.npz" for name in ("loop", "device", "astray", "hard", "in2")}
    links["loop"].symlink_to(links["loop"])
    links["device"].symlink_to("/dev/full")
    links["astray"].symlink_to(tmp_path / "none" / "out.npz")
    links["in2"].symlink_to(npz)
    says = {
        "loop": ("no such file", "leads to itself"),
        "device": ("not a regular file", "not a regular file"),
        "astray": ("no such file", "folder does not exist"),
    }
    for name, (reading, writing) in says.items():
        assert reading in refused("run", file, "--tensors", links[name])
        assert writing in refused("run", file, "--tensors", npz, "--out", links[name])
        assert links[name].is_symlink()
    # Of a file with two names only the one that was asked for is another file.
    links["hard"].hardlink_to(npz)
    given = read_npz(npz)
    result = cli("run", file, "--tensors", links["in2"], "--out", links["hard"], "--repeat", 1)
    assert result.exit_code == 0, result.output
    assert sorted(read_npz(npz)) == sorted(given)
    assert "diff_src" in read_npz(links["hard"])


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null", "/proc/self/mem", "/"])
def test_devices(refused, path):
    assert path in refused("run", path)


def test_a_temporary_name_that_is_taken(refused, write_json, npz, call, tmp_path, monkeypatch):
    """It would take somebody who guesses 64 bits; what is theirs stays theirs even so."""
    monkeypatch.setattr("backnorm.files.secrets.token_hex", lambda _: "0")
    taken = tmp_path / ".backnorm.0.part"
    taken.write_bytes(b"somebody's")
    out = tmp_path / "out.npz"
    line = refused("run", write_json(call()), "--tensors", npz, "--out", out)
    assert "File exists" in line
    assert taken.read_bytes() == b"somebody's"
    assert not out.exists()


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


def test_an_arithmetic_that_is_none(refused, write_json, npz, call):
    line = refused("run", write_json(call()), "--tensors", npz, "--arithmetic", "single")
    assert "--arithmetic: unknown; got 'single'; accepted: 'float32' or 'float64'" in line
