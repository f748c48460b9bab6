"""Read and write .safetensors files.

Files are read, never mapped: a mapped file that another process cuts off ends this one by SIGBUS,
where a read is an ordinary error. The package `safetensors` maps every file that it opens.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from safetensors.numpy import save

from backnorm.cli.allowance import Allowance
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown
from backnorm.graph.logical_tensor import check_elements
from backnorm.graph.strict_json import (
    expect_integer,
    expect_list,
    expect_object,
    expect_string,
    parse_json,
)

__all__ = ["SafetensorsFile", "write_safetensors"]

_TYPES = {"F64": FLOAT64, "F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
_LENGTH_BYTES = 8
# The header's key that names no tensor.
_REMARKS = "__metadata__"
# More than any operator's tensor has, and fewer than NumPy's arrays may have.
_MOST_AXES = 32
_LARGEST = 2**63 - 1


class _Entry(NamedTuple):
    """What the header says of a tensor; `begin` and `end` count from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A .safetensors file, open for reading; a tensor is read when it is loaded.

    Parameters
    ----------
    path : Path
    allowance : Allowance, optional
        Of memory, for the header.

    Attributes
    ----------
    names : tuple of str

    Raises
    ------
    ArgumentError
        If the file is damaged, its header is too large, or a tensor that is loaded has an element
        type that backnorm does not take.
    """

    def __init__(self, path: Path, allowance: Allowance | None = None) -> None:
        self._path = path
        self._stream = path.open("rb")
        try:
            self._entries = self._read_header(allowance or Allowance())
        except BaseException:
            self._stream.close()
            raise
        self.names = tuple(self._entries)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def load(self, name: str) -> np.ndarray:
        """Return the array `name`."""
        where = f"{self._path}[{name}]"
        entry = self._entries[name]
        if entry.dtype not in _TYPES:
            raise ArgumentTypeError(
                where,
                "unsupported element type",
                came=shown(entry.dtype),
                accepted=", ".join(_TYPES),
            )
        if len(entry.shape) > _MOST_AXES:
            raise ArgumentValueError(
                where, "has too many axes", came=len(entry.shape), accepted=f"at most {_MOST_AXES}"
            )
        check_elements(entry.shape, where)
        dtype, size = _TYPES[entry.dtype], entry.end - entry.begin
        if math.prod(entry.shape) * dtype.itemsize != size:
            raise ArgumentValueError(
                where,
                "is damaged: the declared shape contradicts the amount of data",
                came=f"{size} bytes for shape {entry.shape} of {dtype}",
            )
        array = np.empty(entry.shape, dtype)
        self._stream.seek(entry.begin)
        if self._stream.readinto(array.reshape(-1).view(np.uint8)) != size:  # type: ignore[arg-type]
            raise ArgumentValueError(where, "is damaged: the file ends before the tensor does")
        return array

    def _read_header(self, allowance: Allowance) -> dict[str, _Entry]:
        """Return the tensors that the header names, which lie one behind the other in the file."""
        where = str(self._path)
        size = self._stream.seek(0, os.SEEK_END)
        self._stream.seek(0)
        head = self._stream.read(_LENGTH_BYTES)
        length = int.from_bytes(head, "little")
        start = _LENGTH_BYTES + length
        if len(head) < _LENGTH_BYTES or start > size:
            raise ArgumentValueError(
                where,
                "is not a .safetensors file, or is damaged: the header is longer than the file",
            )
        allowance.check_text(length, where, "the header")
        document = parse_json(self._stream.read(length), f"{where}: header")
        entries = {
            name: _parse_entry(value, start, f"{where}: header: {shown(name)}")
            for name, value in expect_object(document, f"{where}: header").items()
            if name != _REMARKS
        }
        end = start
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != end or entry.end < entry.begin:
                break
            end = entry.end
        else:
            if end == size:
                return entries
        raise ArgumentValueError(
            where, "is damaged: the tensors that the header names do not fill the file"
        )


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors`, in C order and little-endian."""
    stream.write(save({name: np.asarray(each, order="C") for name, each in tensors.items()}))


def _parse_entry(value: object, start: int, where: str) -> _Entry:
    """Return the tensor that a header's `value` describes; its data is counted from `start`."""
    fields = expect_object(value, where)
    shape, offsets = (
        [
            expect_integer(number, f"{where}.{key}", low=0, high=_LARGEST)
            for number in expect_list(fields.get(key), f"{where}.{key}")
        ]
        for key in ("shape", "data_offsets")
    )
    if len(offsets) != 2:
        raise ArgumentValueError(f"{where}.data_offsets", "must be two numbers", came=len(offsets))
    dtype = expect_string(fields.get("dtype"), f"{where}.dtype")
    return _Entry(dtype, tuple(shape), start + offsets[0], start + offsets[1])
