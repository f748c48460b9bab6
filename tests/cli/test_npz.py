"""The .npz reader: what numpy writes comes back; what lies is refused before it costs memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
import warnings
import zipfile

import ml_dtypes
import numpy as np
import pytest

from backnorm.cli.allowance import Allowance
from backnorm.cli.npz import NpzFile, write_npz
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError


def header(text, version=(1, 0)):
    data = text.encode("latin-1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(data))
    return b"\x93NUMPY" + bytes(version) + size + data


def describe(shape, descr="<f4", order=False):
    return header(f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {shape}}}")


@pytest.fixture
def archive(tmp_path):
    """Write a zip archive of given members and return its path."""

    def write(*members, compression=zipfile.ZIP_STORED):
        path = tmp_path / "file.npz"
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w", compression) as zipped:
            warnings.filterwarnings("ignore", "Duplicate name")
            for name, data in members:
                zipped.writestr(name, data)
        return path

    return write


def load(path, name="x"):
    with NpzFile(path) as file:
        return file.load(name)


ARRAYS = {
    "float32": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "float64": np.array([[1.5, np.nan], [np.inf, -0.0]]),
    "float16": np.array([1, 65504, 6e-8], np.float16),
    "fortran": np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    "big endian": np.arange(6, dtype=">f4").reshape(2, 3),
    "empty": np.empty((0, 7), np.float32),
    "scalar": np.array(3.0, np.float32),
    "strided": np.arange(24.0)[::-2],
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_what_numpy_saves_is_read(tmp_path, name, save):
    path = tmp_path / "file.npz"
    save(path, x=ARRAYS[name])
    array = load(path)
    assert array.dtype.isnative
    assert array.shape == ARRAYS[name].shape
    np.testing.assert_array_equal(array, ARRAYS[name])


def test_bfloat16_is_two_opaque_bytes(tmp_path, rng):
    array = rng.normal(size=(3, 4)).astype(ml_dtypes.bfloat16)
    np.savez(tmp_path / "file.npz", x=array)
    read = load(tmp_path / "file.npz")
    assert read.dtype == ml_dtypes.bfloat16
    assert read.tobytes() == array.tobytes()


def test_numpy_reads_what_is_written(tmp_path, read_npz):
    path = tmp_path / "file.npz"
    bfloat16 = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    with path.open("wb") as stream:
        write_npz(stream, ARRAYS | {"bfloat16": bfloat16})
    read = read_npz(path)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(read[name], array)
    assert read["bfloat16"].dtype == np.dtype("V2")
    assert load(path, "bfloat16").tobytes() == bfloat16.tobytes()


def test_the_same_tensors_are_the_same_bytes():
    first, second = io.BytesIO(), io.BytesIO()
    write_npz(first, ARRAYS)
    write_npz(second, ARRAYS)
    assert first.getvalue() == second.getvalue()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "malformed .npy header: EOF"),
        (b"\x93NUM", "malformed .npy header: EOF"),
        (b"\x93NUMPZ\1\0" + b"\0" * 50, "magic string"),
        (b"\x93NUMPY\x09\x00" + b"\0" * 50, "version"),
        (header("{" + " " * 10_000 + "}"), "malformed"),
        (header("L" * 9_000), "malformed"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\x7f", "expected 2147483647 bytes got 0"),
        (b"\x93NUMPY\x01\x00\x40\x00{", "expected 64 bytes got 1"),
        (header("{"), "malformed"),
        (describe("(1,)", "") + b"\0" * 4, "malformed .npy header: descr"),
        (describe("(1,)", ()) + b"\0" * 4, "malformed .npy header: tuple index"),
        (describe("(1,)", [()]) + b"\0" * 4, "malformed"),
        (header("(" * 5000), "malformed"),
        (header("'\\d'"), "malformed"),
        (header("__import__('os')"), "malformed"),
        (header("{'descr': '<f4', 'shape': (1,)}") + b"\0" * 4, "malformed"),
        (describe("[2]") + b"\0" * 8, "malformed"),
        (describe("(2,)", order="'yes'") + b"\0" * 8, "malformed"),
        (describe("(-1,)") + b"\0" * 8, "impossible shape"),
        (describe("(True,)") + b"\0" * 4, "impossible shape"),
        (describe("(2.0,)") + b"\0" * 8, "malformed"),
        (describe(f"({2**70},)") + b"\0" * 8, "impossible shape"),
        (describe("(" + "1," * 33 + ")") + b"\0" * 4, "impossible shape"),
        (describe("(3,)") + b"\0" * 8, "contradicts the amount of data"),
        (describe("(1,)") + b"\0" * 8, "contradicts the amount of data"),
        (describe(f"({2**40}, {2**20})") + b"\0" * 8, "contradicts the amount of data"),
    ],
)
def test_a_member_that_lies_about_itself(archive, data, says):
    with pytest.raises(ArgumentValueError, match=says) as caught:
        load(archive(("x.npy", data)))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("descr", ["|O", "<i4", "<c8", "<U3", "|b1", "<f8,<f8", "<V3", "\0"])
def test_an_element_type_that_is_not_ours(archive, descr):
    with pytest.raises(ArgumentTypeError, match="unsupported element type"):
        load(archive(("x.npy", describe("(1,)", descr) + b"\0" * 64)))


def test_a_header_of_python_2_is_read_without_a_warning(archive):
    assert load(archive(("x.npy", describe("(2L,)") + b"\0" * 8))).shape == (2,)


def test_pickled_objects_are_refused_and_not_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    np.savez(tmp_path / "file.npz", x=np.array([Bomb()], object))
    with pytest.raises(ArgumentTypeError, match="unsupported element type"):
        load(tmp_path / "file.npz")


def test_members_that_are_not_used_may_be_of_any_type(tmp_path):
    np.savez(tmp_path / "file.npz", x=np.ones(2), labels=np.array(["a", "b"]))
    assert load(tmp_path / "file.npz").sum() == 2


def test_two_members_of_one_name(archive):
    data = describe("(1,)") + b"\0" * 4
    with pytest.raises(ArgumentValueError, match=r"two members called 'x\.npy'"):
        load(archive(("x.npy", data), ("x.npy", data)))


def test_a_member_that_is_no_array(archive):
    with pytest.raises(ArgumentValueError, match=r"not a \.npy member"):
        load(archive(("x.txt", b"hello")))


def test_a_compression_that_numpy_does_not_use(archive):
    with pytest.raises(ArgumentValueError, match="unsupported compression"):
        load(archive(("x.npy", describe("(0,)")), compression=zipfile.ZIP_BZIP2))


def test_an_encrypted_member(archive):
    path = archive(("x.npy", describe("(1,)") + b"\0" * 4))
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    data[directory + 8] |= 1
    path.write_bytes(data)
    with pytest.raises(ArgumentValueError, match="encrypted"):
        load(path)


def test_a_wrong_checksum(archive):
    path = archive(("x.npy", describe("(1,)") + b"abcd"))
    path.write_bytes(path.read_bytes().replace(b"abcd", b"abce"))
    with pytest.raises(ArgumentValueError, match="damaged"):
        load(path)


def declare_size(path, size):
    """Change the uncompressed size that the archive's directory and member header declare."""
    data = bytearray(path.read_bytes())
    directory = data.index(b"PK\x01\x02")
    data[directory + 24 : directory + 28] = struct.pack("<I", size)
    data[22:26] = struct.pack("<I", size)
    path.write_bytes(data)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_declared_size_costs_no_memory(archive, compression):
    size = 2**30
    data = describe(f"({(size - 128) // 4},)").ljust(128)
    path = archive(("x.npy", data), compression=compression)
    declare_size(path, size)
    tracemalloc.start()
    with pytest.raises(ArgumentValueError, match="cannot have"):
        load(path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_every_truncation_is_refused(archive, compression):
    path = archive(("x.npy", describe("(9,)") + bytes(range(36))), compression=compression)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ArgumentError):
            load(path)


def test_compressed_members_share_what_is_allowed(archive):
    data = describe((2**18,)) + bytes(2**20)
    members = [(f"{name}.npy", data) for name in "ab"]
    path = archive(*members, compression=zipfile.ZIP_DEFLATED)
    with NpzFile(path, Allowance(3)) as file:
        assert file.load("a").nbytes == file.load("b").nbytes == 2**20
    with NpzFile(path, Allowance(2)) as file:
        file.load("a")
        with pytest.raises(ArgumentValueError, match=r"unpacks to too much.*--max-unpacked"):
            file.load("b")
    # What is as large as its file needs no allowance.
    with NpzFile(archive(*members), Allowance(1)) as file:
        assert file.load("a").nbytes == file.load("b").nbytes == 2**20


def test_an_archive_with_a_large_directory(archive):
    path = archive(*((f"{i:0200}.npy", b"") for i in range(1000)))
    with NpzFile(path) as file:
        assert len(file.names) == 1000
    with pytest.raises(ArgumentValueError, match=r"directory is too large.*--max-unpacked"):
        NpzFile(path, Allowance(1))


def test_members_that_lead_out_of_a_folder(archive):
    """Names are names of tensors, and of no files."""
    path = archive(
        ("../../x.npy", describe((1,)) + bytes(4)), ("/y.npy", describe((1,)) + bytes(4))
    )
    with NpzFile(path) as file:
        assert file.names == ("../../x", "/y")
        assert file.load("../../x").shape == (1,)
