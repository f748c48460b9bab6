"""Read and write .safetensors files, by the safetensors package.

Files are mapped, and a tensor is read when it is needed. What the package says of a damaged file is
part of our error; how large a header may be is a limit of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np
import safetensors
from safetensors.numpy import save

from backnorm.cli.allowance import Allowance
from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32, FLOAT64
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.logical_tensor import check_elements

__all__ = ["SafetensorsFile", "write_safetensors"]

_TYPES = {"F64": FLOAT64, "F32": FLOAT32, "F16": FLOAT16, "BF16": BFLOAT16}
_LENGTH_BYTES = 8
# More than anything has here, and fewer than NumPy has.
_MOST_AXES = 32


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
        If the file is damaged, its header is too large, or a tensor that is loaded has an element
        type that backnorm does not take.
    """

    def __init__(self, path: Path, allowance: Allowance | None = None) -> None:
        self._path = path
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            # One that says that it is larger than the file is not read by the package either.
            if length <= path.stat().st_size:
                (allowance or Allowance()).check_text(length, str(path), "the header")
        try:
            self._file = safetensors.safe_open(path, framework="np")
        except safetensors.SafetensorError as error:
            raise ArgumentValueError(
                str(path), f"is not a .safetensors file, or is damaged: {error}"
            ) from None
        self.names = tuple(self._file.keys())

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def load(self, name: str) -> np.ndarray:
        """Return the array `name`."""
        where = f"{self._path}[{name}]"
        declared = self._file.get_slice(name)
        came, shape = declared.get_dtype(), tuple(declared.get_shape())
        if came not in _TYPES:
            raise ArgumentTypeError(
                where, "unsupported element type", came=came, accepted=", ".join(_TYPES)
            )
        if len(shape) > _MOST_AXES:
            raise ArgumentValueError(
                where, "has too many axes", came=len(shape), accepted=f"at most {_MOST_AXES}"
            )
        check_elements(shape, where)
        array: np.ndarray = self._file.get_tensor(name)
        return array


def write_safetensors(stream: BinaryIO, tensors: Mapping[str, np.ndarray]) -> None:
    """Write `tensors`, in C order and little-endian."""
    stream.write(save({name: np.asarray(each, order="C") for name, each in tensors.items()}))
