"""Tensor files: what NumPy and safetensors write is read, and the reverse; damage is an error."""

from __future__ import annotations

import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backnorm.errors import ArgumentValueError
from backnorm.tensor_files import read_tensors, write_tensors

ARRAYS = {
    "float64": np.array([[1.5, np.nan], [np.inf, -0.0]]),
    "float32": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "float16": np.array([1, 65504, 6e-8], np.float16),
    "bfloat16": np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "strided": np.arange(24.0)[::-2],
    "empty": np.empty((0, 7), np.float32),
    "scalar": np.array(3.0, np.float32),
    # A name that `numpy.savez` cannot take.
    "file": np.ones(1),
    "ünïcode": np.ones(1),
}


def everything(names):
    return {name: name for name in names}


def load(path, max_unpacked=1024):
    return read_tensors(path, everything, max_unpacked)


def check_same(arrays, expected):
    assert set(arrays) == set(expected)
    for name, array in expected.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert (arrays[name].dtype, arrays[name].shape) == (native.dtype, native.shape)
        assert arrays[name].tobytes() == native.tobytes()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_reader_returns_arrays_that_numpy_saved(tmp_path, save):
    arrays = {name: array for name, array in ARRAYS.items() if name != "file"}
    arrays["big endian"] = np.arange(6, dtype=">f4").reshape(2, 3)
    save(tmp_path / "in.npz", **arrays)
    check_same(load(tmp_path / "in.npz"), arrays)


def test_safetensors_reader_returns_arrays_that_the_package_saved(tmp_path):
    arrays = {name: np.asarray(array, order="C") for name, array in ARRAYS.items()}
    save_file(arrays, tmp_path / "in.safetensors", metadata={"made by": "a test"})
    check_same(load(tmp_path / "in.safetensors"), arrays)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".NPZ"])
def test_writer_and_reader_of_all_types_and_layouts_agree(tmp_path, suffix):
    write_tensors(tmp_path / f"out{suffix}", ARRAYS)
    check_same(load(tmp_path / f"out{suffix}"), ARRAYS)


def test_libraries_read_written_files(tmp_path, read_npz):
    for suffix in (".npz", ".safetensors"):
        write_tensors(tmp_path / f"out{suffix}", ARRAYS)
    check_same(load_file(tmp_path / "out.safetensors"), ARRAYS)
    # NumPy has no other type for bfloat16.
    opaque = ARRAYS | {"bfloat16": ARRAYS["bfloat16"].view("V2")}
    check_same(read_npz(tmp_path / "out.npz"), opaque)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_writer_of_the_same_tensors_gives_the_same_bytes(tmp_path, suffix):
    paths = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in paths:
        write_tensors(path, ARRAYS)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_reader_reads_selected_tensors_alone(tmp_path):
    np.savez(tmp_path / "in.npz", x=np.ones(2), labels=np.array([{}], object))
    arrays = read_tensors(tmp_path / "in.npz", lambda _: {"key": "x"}, 1)
    assert arrays["key"].tolist() == [1, 1]


def test_npz_reader_rejects_objects_without_unpickling(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    np.savez(tmp_path / "in.npz", x=np.array([Bomb()], object))
    with pytest.raises(ArgumentValueError, match="cannot be read: Object arrays cannot be loaded"):
        load(tmp_path / "in.npz")


def test_npz_reader_rejects_a_pickle(tmp_path):
    np.array([{}], object).dump(tmp_path / "in.npz")
    with pytest.raises(ArgumentValueError, match=r"in\.npz: is not a \.npz file"):
        load(tmp_path / "in.npz")


def test_npz_reader_rejects_large_contents_before_memory_is_taken(tmp_path):
    zeros = {name: np.zeros(2**19) for name in "ab"}
    np.savez_compressed(tmp_path / "small.npz", **zeros)
    np.savez(tmp_path / "large.npz", **zeros)
    tracemalloc.start()
    with pytest.raises(ArgumentValueError, match=r"is too large when unpacked.*--max-unpacked"):
        load(tmp_path / "small.npz", max_unpacked=7)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    check_same(load(tmp_path / "small.npz", max_unpacked=8), zeros)
    # Arrays that are not compressed are as large as their file.
    check_same(load(tmp_path / "large.npz", max_unpacked=1), zeros)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_reader_rejects_every_truncation(tmp_path, suffix):
    path = tmp_path / f"in{suffix}"
    write_tensors(path, {"x": np.arange(9, dtype=np.float32)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArgumentValueError, match=r"in\."):
            load(path)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "member",
    [
        b"\x93NUMPY\x01\x00\x40\x00{",
        b"\x93NUMPY\x01\x00\x0c\x00__import__()",
        b"\x93NUMPY\x01\x00\x36\x00{'descr': '<f4', 'fortran_order': False, 'shape': (9,)} ",
    ],
)
def test_npz_reader_rejects_damaged_members(tmp_path, member, compression):
    with zipfile.ZipFile(tmp_path / "in.npz", "w", compression) as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(ArgumentValueError, match="cannot be read"):
        load(tmp_path / "in.npz")


@pytest.mark.parametrize("name", ["in.npy", "in", "in.npz.bak"])
def test_reader_and_writer_reject_other_extensions(tmp_path, name):
    for attempt in (load, lambda path: write_tensors(path, {})):
        with pytest.raises(ArgumentValueError, match=r"unknown kind.*\.npz or \.safetensors"):
            attempt(tmp_path / name)
    assert not list(tmp_path.iterdir())
