"""The .safetensors reader and writer, against the safetensors package and against lies."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from backnorm.cli.allowance import Allowance
from backnorm.cli.safetensors_file import SafetensorsFile, write_safetensors
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError

ARRAYS = {
    "f64": np.arange(6.0).reshape(2, 3),
    "f32": np.arange(5, dtype=np.float32),
    "f16": np.array([[1.5]], np.float16),
    "bf16": np.arange(4).astype(ml_dtypes.bfloat16),
    "empty": np.empty((0, 3), np.float32),
    "scalar": np.array(2.0, np.float32),
}


def load(path, name="x"):
    with SafetensorsFile(path) as file:
        return file.load(name)


@pytest.fixture
def written(tmp_path):
    """Write a header, an object or bytes, and data; return the path."""

    def write(header, data=b"", length=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path = tmp_path / "file.safetensors"
        size = len(text) if length is None else length
        path.write_bytes(size.to_bytes(8, "little") + text + data)
        return path

    return write


def entry(shape=(2,), dtype="F32", offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize("name", ARRAYS)
def test_what_the_package_saves_is_read(tmp_path, name):
    path = tmp_path / "file.safetensors"
    save_file(ARRAYS, path, metadata={"made by": "a test"})
    array = load(path, name)
    assert (array.dtype, array.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
    assert array.tobytes() == ARRAYS[name].tobytes()


def test_the_package_reads_what_is_written(tmp_path):
    path = tmp_path / "file.safetensors"
    arrays = ARRAYS | {"strided": np.arange(24.0).reshape(4, 6).T, "ünïcode": np.ones(1)}
    with path.open("wb") as stream:
        write_safetensors(stream, arrays)
    read = load_file(path)
    assert set(read) == set(arrays)
    for name, array in arrays.items():
        assert (read[name].dtype, read[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(read[name], array)


def test_tensors_that_are_not_used_may_be_of_any_type(written):
    header = {"x": entry(), "labels": entry((8,), "I8", (8, 16))}
    assert load(written(header, b"\0" * 16)).shape == (2,)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b'{"x": 1}',
        b'{"x": {}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "x": {}}',
        {"x": entry(offsets=(0,))},
        {"x": entry(offsets=(0, 4, 8))},
        {"x": entry(offsets=(-8, 0))},
        {"x": entry(offsets=(0, 2**63))},
        {"x": entry(offsets=(8, 0))},
        {"x": entry(offsets=(0, 16))},
        {"x": entry(offsets=(0, 4))},
        {"x": entry(offsets=(4, 8))},
        {"x": entry(), "y": entry()},
        {"x": entry((1,))},
        {"x": entry((-2,))},
        {"x": entry((2.0,))},
        {"x": entry((True,))},
        {"x": entry(dtype=None)},
        {"x": {"dtype": "F32", "shape": [2]}},
        {"x": entry((2**70,))},
    ],
)
def test_a_header_that_lies(written, header):
    with pytest.raises(ArgumentError, match=r"file\.safetensors(: .*header|\[x\]: is damaged)"):
        load(written(header, b"\0" * 8))


@pytest.mark.parametrize(
    ("dtype", "size"), [("I64", 1), ("BOOL", 8), ("F8_E4M3", 8), ("C64", 1), ("float32", 2)]
)
def test_an_element_type_that_is_not_ours(written, dtype, size):
    with pytest.raises(ArgumentTypeError, match=rf"\[x\]: unsupported element type.*{dtype}"):
        load(written({"x": entry((size,), dtype)}, b"\0" * 8))


def test_an_error_about_a_long_name_is_short(written):
    for header in ({"x" * 10**6: 1}, {"x": entry(dtype="F" * 10**6)}):
        with pytest.raises(ArgumentTypeError) as caught:
            load(written(header, b"\0" * 8))
        assert len(str(caught.value)) < 1000


def test_an_array_that_numpy_cannot_have(written):
    with pytest.raises(ArgumentValueError, match=r"\[x\]: has too many axes.*100"):
        load(written({"x": entry([1] * 100, offsets=(0, 4))}, b"\0" * 4))
    with pytest.raises(ArgumentValueError, match=r"\[x\]: has too many elements"):
        load(written({"x": entry((2**40, 0, 2**20), offsets=(0, 0))}))
    with pytest.raises(ArgumentValueError, match=r"\[x\]: has too many elements"):
        load(written({"x": entry((2**40, 2**20))}, b"\0" * 8))


@pytest.mark.parametrize("length", [0, 7, 10**6, 2**63, 2**64 - 1])
def test_a_header_length_that_lies(written, length):
    with pytest.raises(ArgumentError):
        load(written({"x": entry()}, b"\0" * 8, length=length))


def test_every_truncation_is_refused(written):
    path = written({"x": entry()}, b"12345678")
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArgumentValueError):
            load(path)


@pytest.mark.parametrize("left", [0, 10, 5000])
def test_a_file_cut_off_while_it_is_open_is_refused(tmp_path, left):
    """A mapped file would end the process by SIGBUS."""
    path = tmp_path / "file.safetensors"
    save_file({"x": np.ones(2**16, np.float32), "y": np.ones(2, np.float32)}, path)
    with SafetensorsFile(path) as file:
        os.truncate(path, left)
        for name in file.names:
            with pytest.raises(ArgumentValueError, match=rf"\[{name}\]: .* file ends before"):
                file.load(name)


def test_tensors_are_read_by_their_offsets_in_any_order(tmp_path, rng):
    path = tmp_path / "file.safetensors"
    arrays = {f"{i}": rng.normal(size=(i, 3)) for i in (5, 0, 2000, 1)}
    save_file(arrays, path)
    with SafetensorsFile(path) as file:
        for name in (*arrays, *reversed(arrays)):
            np.testing.assert_array_equal(file.load(name), arrays[name])


def test_a_header_that_is_too_large(written):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    path = written({f"{i}": entry for i in range(4000)})
    with SafetensorsFile(path) as file:
        assert len(file.names) == 4000
    with pytest.raises(ArgumentValueError, match=r"header is too large.*--max-unpacked"):
        SafetensorsFile(path, Allowance(1))
