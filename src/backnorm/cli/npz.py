"""Read and write .npz files: no pickle, and nothing allocated on a file's word alone."""

from __future__ import annotations

import ast
import io
import struct
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np

from backnorm.cli.allowance import Allowance
from backnorm.cli.buffers import native, read_exactly
from backnorm.dtypes import BFLOAT16, ELEMENT_TYPES, element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["NpzFile", "write_npz"]

_SUFFIX = ".npy"
_MAX_MEMBERS = 100_000
# A .npy header is some 100 bytes; NumPy itself refuses more than this unless told otherwise.
_MAX_HEADER = 10_000
_MAGIC = b"\x93NUMPY"
# Deflate cannot do better: 258 bytes for at least two bits.
_MAX_RATIO = 1032
# numpy saves ml_dtypes' bfloat16 as two opaque bytes.
_OPAQUE = np.dtype("V2")
_BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    EOFError,
    NotImplementedError,
    OverflowError,
    RuntimeError,
    UnicodeError,
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
            with self._archive.open(member) as stream:
                return _read_member(stream, member.file_size, where)
        except (ArgumentTypeError, ArgumentValueError):
            raise
        except _BROKEN as error:
            raise ArgumentValueError(where, f"is damaged: {error}") from error

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


def _read_member(stream: IO[bytes], member_size: int, where: str) -> np.ndarray:
    dtype, fortran_order, shape, header_size = _read_header(stream, where)
    expected = header_size + dtype.itemsize * int(np.prod([int(d) for d in shape], dtype=object))
    if expected != member_size:
        raise ArgumentValueError(
            where,
            "the declared shape contradicts the amount of data",
            came=f"{member_size} bytes",
            accepted=f"{expected} bytes for shape {shape} of {dtype}",
        )
    array = read_exactly(stream, dtype, shape, where, "F" if fortran_order else "C")
    if stream.read(1):
        raise ArgumentValueError(where, "has more data than it declares")
    return native(array)


def _read_header(stream: IO[bytes], where: str) -> tuple[np.dtype, bool, tuple[int, ...], int]:
    """Return (element type, Fortran order, shape, bytes read)."""
    prefix = stream.read(len(_MAGIC) + 2)
    if len(prefix) < len(_MAGIC) + 2 or not prefix.startswith(_MAGIC):
        raise ArgumentValueError(where, "is not in .npy format")
    major = prefix[-2]
    if major not in (1, 2, 3):
        raise ArgumentValueError(where, "unsupported .npy version", came=major, accepted="1, 2, 3")
    field = stream.read(2 if major == 1 else 4)
    length = int.from_bytes(field, "little")
    if length > _MAX_HEADER:
        raise ArgumentValueError(
            where, "the .npy header is too long", came=length, accepted=f"at most {_MAX_HEADER}"
        )
    text = stream.read(length)
    if len(text) < length:
        raise ArgumentValueError(where, "is truncated in the .npy header")
    fields = _parse_header(text.decode("utf-8" if major == 3 else "latin-1"), where)
    dtype = _element_type(fields["descr"], where)
    shape, order = fields["shape"], fields["fortran_order"]
    if not isinstance(order, bool) or not isinstance(shape, tuple):
        raise ArgumentValueError(where, "has a malformed .npy header")
    if len(shape) > 32 or not all(type(dim) is int and 0 <= dim < 2**62 for dim in shape):
        raise ArgumentValueError(where, "has an impossible shape", came=shape)
    return dtype, order, shape, len(prefix) + len(field) + length


def _parse_header(text: str, where: str) -> dict[str, object]:
    try:
        with warnings.catch_warnings():
            # Odd escapes in a hostile header make the compiler warn.
            warnings.simplefilter("ignore")
            fields = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ArgumentValueError(where, "has a malformed .npy header") from error
    if not isinstance(fields, dict) or set(fields) != {"descr", "fortran_order", "shape"}:
        raise ArgumentValueError(where, "has a malformed .npy header")
    return fields


def _element_type(descr: object, where: str) -> np.dtype:
    """Return the type as stored (byte order kept) that a .npy header's `descr` names."""
    accepted = ", ".join(str(t) for t in ELEMENT_TYPES)
    try:
        if not isinstance(descr, str):
            raise TypeError("structured")
        with warnings.catch_warnings():
            # Some names of types are deprecated; none is one that is accepted.
            warnings.simplefilter("ignore")
            dtype: np.dtype = np.dtype(descr)
    except (TypeError, ValueError, SyntaxError, OverflowError) as error:
        raise ArgumentTypeError(where, "unsupported element type", accepted=accepted) from error
    if dtype == _OPAQUE:
        dtype = BFLOAT16
    if element_type(dtype) is None:
        raise ArgumentTypeError(where, "unsupported element type", came=dtype, accepted=accepted)
    return dtype
