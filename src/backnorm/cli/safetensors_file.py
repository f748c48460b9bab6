"""Read and write .safetensors files.

The format is an 8-byte little-endian length, a JSON header of that length (name -> dtype, shape,
data_offsets), and the data; see https://huggingface.co/docs/safetensors. It is read here rather
than by the safetensors package so that every refusal is one clear line, each tensor is read only
when needed, and bfloat16 needs no framework.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from backnorm.cli.allowance import Allowance
from backnorm.cli.buffers import read_exactly
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.strict_json import (
    expect_integer,
    expect_list,
    expect_object,
    expect_string,
    parse_json,
)

__all__ = ["SafetensorsFile", "write_safetensors"]

_TYPES = {"F64": FLOAT64, "F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_LENGTH_BYTES = 8
# The limit of the safetensors package itself.
_MAX_HEADER = 100_000_000
_METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """A .safetensors file, open for reading.

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
        If the header is damaged, or its offsets and shapes contradict the file or each other, or
        a tensor that is loaded has an element type that backnorm does not take.
    """

    def __init__(self, path: Path, allowance: Allowance | None = None) -> None:
        self._path = path
        self._stream = path.open("rb")
        try:
            self._entries, self._data_start = self._index(allowance or Allowance())
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
        if entry.dtype_name not in _TYPES:
            raise ArgumentTypeError(
                where,
                "unsupported element type",
                came=entry.dtype_name,
                accepted=", ".join(_TYPES),
            )
        dtype = _TYPES[entry.dtype_name]
        expected = math.prod(entry.shape) * dtype.itemsize
        if entry.end - entry.begin != expected:
            raise ArgumentValueError(
                where,
                "the declared shape contradicts the amount of data",
                came=f"{entry.end - entry.begin} bytes",
                accepted=f"{expected} bytes for shape {entry.shape} of {dtype}",
            )
        self._stream.seek(self._data_start + entry.begin)
        return read_exactly(self._stream, dtype, entry.shape, where)

    def _index(self, allowance: Allowance) -> tuple[dict[str, _Entry], int]:
        where = str(self._path)
        size = self._path.stat().st_size
        length = int.from_bytes(self._stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER):
            raise ArgumentValueError(where, "is not a .safetensors file, or is truncated")
        allowance.check_text(length, where, "the header")
        header = self._stream.read(length)
        if not header.startswith(b"{"):
            raise ArgumentValueError(where, "is not a .safetensors file: no JSON header")
        fields = expect_object(parse_json(header, where), where)
        start = _LENGTH_BYTES + length
        entries = {
            name: _parse_entry(value, f"{where}[{name}]")
            for name, value in fields.items()
            if name != _METADATA
        }
        _check_offsets(entries, size - start, where)
        return entries, start


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors`, in C order and little-endian."""
    header: dict[str, object] = {}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data start at a multiple of 8
    stream.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
    stream.write(text)
    for array in tensors.values():
        # View as bytes: bfloat16 does not speak the buffer protocol.
        stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _parse_entry(value: object, where: str) -> _Entry:
    fields = expect_object(value, where)
    dims = expect_list(fields.get("shape"), f"{where}.shape", most=32)
    offsets = expect_list(fields.get("data_offsets"), f"{where}.data_offsets", most=2)
    if len(offsets) != 2:
        raise ArgumentValueError(f"{where}.data_offsets", "must be a beginning and an end")
    begin, end = (
        expect_integer(o, f"{where}.data_offsets", low=0, high=2**63 - 1) for o in offsets
    )
    return _Entry(
        expect_string(fields.get("dtype"), f"{where}.dtype"),
        tuple(expect_integer(d, f"{where}.shape", low=0, high=2**62) for d in dims),
        begin,
        end,
    )


def _check_offsets(entries: Mapping[str, _Entry], data_size: int, where: str) -> None:
    """Raise unless the tensors fill the data exactly: no gap, no overlap, nothing beyond."""
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position or entry.end < entry.begin:
            raise ArgumentValueError(f"{where}[{name}]", "has offsets that overlap or leave a gap")
        position = entry.end
    if position != data_size:
        raise ArgumentValueError(
            where, "is truncated or too long", came=f"{data_size} bytes", accepted=f"{position}"
        )
