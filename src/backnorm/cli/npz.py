"""Read and write .npz files: no pickle, and nothing allocated on a file's word alone.

NumPy parses headers and reads arrays (`numpy.lib.format`). Before it does, what the archive and the
header declare is compared with what is there.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from backnorm.cli.allowance import Allowance
from backnorm.dtypes import BFLOAT16, ELEMENT_TYPES, element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.logical_tensor import check_elements

__all__ = ["NpzFile", "write_npz"]

_SUFFIX = ".npy"
_MAX_MEMBERS = 100_000
# What a header has at most, with its prefix; it is some 100 bytes. NumPy's own limit is above.
_MAX_HEADER = 10_000
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
# Deflate cannot do better: 258 bytes for at least two bits.
_MAX_RATIO = 1032
# numpy saves ml_dtypes' bfloat16 as two opaque bytes.
_OPAQUE = np.dtype("V2")
# What zipfile raises of damaged files, and NumPy of members.
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    ValueError,
)


class NpzFile:
    """A .npz file, open for reading; members are read, and checked, one by one.

    Parameters
    ----------
    path : Path
    allowance : Allowance, optional
        Of memory, for the archive's directory and for compressed members.

    Attributes
    ----------
    names : tuple of str
        Of the members, without ".npy".

    Raises
    ------
    ArgumentError
        If the file is not a zip archive of .npy members, or a member's declared sizes contradict
        the data, or it is encrypted, of objects, or of an element type that backnorm does not take.
    """

    def __init__(self, path: Path, allowance: Allowance | None = None) -> None:
        self._path = path
        self._allowance = allowance or Allowance()
        self._stream = _Archive(path, self._allowance)
        try:
            self._archive = self._open()
            self._members = self._index()
        except BaseException:
            self._stream.close()
            raise
        self.names = tuple(self._members)

    def __enter__(self) -> NpzFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()
        self._stream.close()

    def load(self, name: str) -> np.ndarray:
        """Return the array `name`, in native byte order, in C or Fortran order as saved."""
        where = f"{self._path}[{name}]"
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED:
            self._allowance.unpack(member.file_size, where)
        try:
            with warnings.catch_warnings():
                # Odd escapes, headers of Python 2 and deprecated names of types cause some.
                warnings.simplefilter("ignore")
                with self._archive.open(member) as stream:
                    dtype = _check_header(stream, member.file_size, where)
                with self._archive.open(member) as stream:
                    array = np.lib.format.read_array(stream, allow_pickle=False)
        except (ArgumentTypeError, ArgumentValueError):
            raise
        except _BROKEN as error:
            raise ArgumentValueError(where, f"is damaged: {error}") from error
        array = array.view(dtype)
        return array if dtype.isnative else array.astype(dtype.newbyteorder("="))

    def _open(self) -> zipfile.ZipFile:
        try:
            archive = zipfile.ZipFile(self._stream)
        except (ArgumentTypeError, ArgumentValueError):
            raise
        except _BROKEN as error:
            raise ArgumentValueError(str(self._path), f"is not a .npz file: {error}") from error
        self._stream.opened = True
        return archive

    def _index(self) -> dict[str, zipfile.ZipInfo]:
        entries = self._archive.infolist()
        if len(entries) > _MAX_MEMBERS:
            raise ArgumentValueError(
                str(self._path), "has too many members", accepted=f"at most {_MAX_MEMBERS}"
            )
        name, times = (
            Counter(entry.filename for entry in entries).most_common(1)[0] if (entries) else ("", 0)
        )
        if times > 1:
            raise ArgumentValueError(str(self._path), f"has two members called {name!r}")
        size = self._path.stat().st_size
        members = {}
        for entry in entries:
            where = f"{self._path}[{entry.filename}]"
            if not entry.filename.endswith(_SUFFIX):
                raise ArgumentValueError(where, "is not a .npy member")
            _check_sizes(entry, size, where)
            members[entry.filename.removesuffix(_SUFFIX)] = entry
        return members


class _Archive(io.BufferedReader):
    """An archive's file, whose directory zipfile reads at once, however large it is."""

    def __init__(self, path: Path, allowance: Allowance) -> None:
        super().__init__(io.FileIO(path))
        self._where, self._allowance = str(path), allowance
        self.opened = False

    def read(self, size: int | None = -1, /) -> bytes:
        """Return `size` bytes; until the archive is opened, no more than is allowed to text."""
        if size is not None and not self.opened:
            self._allowance.check_text(size, self._where, "the archive's directory")
        return super().read(size)


def write_npz(stream: BinaryIO, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors` uncompressed, as ``numpy.savez`` does (bfloat16 as two opaque bytes)."""
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for name, array in tensors.items():
            entry = zipfile.ZipInfo(name + _SUFFIX, date_time=(1980, 1, 1, 0, 0, 0))
            plain = np.ascontiguousarray(array).reshape(array.shape)
            plain = plain.view(_OPAQUE) if plain.dtype == BFLOAT16 else plain
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, plain, allow_pickle=False)


def _check_sizes(entry: zipfile.ZipInfo, file_size: int, where: str) -> None:
    if entry.flag_bits & 1:
        raise ArgumentValueError(where, "is encrypted")
    if entry.compress_type == zipfile.ZIP_STORED:
        most = entry.compress_size
    elif entry.compress_type == zipfile.ZIP_DEFLATED:
        most = entry.compress_size * _MAX_RATIO
    else:
        raise ArgumentValueError(
            where, "unsupported compression", accepted="none (numpy.savez) or deflate"
        )
    if entry.compress_size > file_size or entry.file_size > most:
        raise ArgumentValueError(
            where,
            "declares a size that its compressed data cannot have",
            came=f"{entry.file_size} bytes from {entry.compress_size} in a file of {file_size}",
        )


def _check_header(stream: IO[bytes], member_size: int, where: str) -> np.dtype:
    """Return the element type as stored (byte order kept) of the member that begins here."""
    # No more of it, whatever length it declares.
    head = io.BytesIO(stream.read(_MAX_HEADER))
    try:
        version = np.lib.format.read_magic(head)
        if version not in _HEADERS:
            raise ValueError(f"version {version} is none of 1.0 and 2.0")
        shape, _, stored = _HEADERS[version](head)
    except Exception as error:
        # NumPy raises whatever comes of a header, an IndexError too, and may quote all of it.
        said = str(error.args[0])[:200] if error.args else type(error).__name__
        raise ArgumentValueError(where, f"has a malformed .npy header: {said}") from error
    dtype = BFLOAT16 if stored == _OPAQUE else stored
    if element_type(dtype) is None:
        accepted = ", ".join(str(t) for t in ELEMENT_TYPES)
        raise ArgumentTypeError(where, "unsupported element type", came=dtype, accepted=accepted)
    if len(shape) > 32 or not all(type(dim) is int and 0 <= dim < 2**62 for dim in shape):
        raise ArgumentValueError(where, "has an impossible shape", came=shape)
    expected = head.tell() + dtype.itemsize * math.prod(shape)
    if expected != member_size:
        raise ArgumentValueError(
            where,
            "the declared shape contradicts the amount of data",
            came=f"{member_size} bytes",
            accepted=f"{expected} bytes for shape {shape} of {dtype}",
        )
    check_elements(shape, where)
    return dtype
