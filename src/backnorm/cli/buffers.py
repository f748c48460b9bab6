"""Bytes of a file into arrays, piece by piece."""

from __future__ import annotations

import math
from typing import IO, Literal

import numpy as np

from backnorm.errors import ArgumentValueError
from backnorm.graph.logical_tensor import check_elements

__all__ = ["native", "read_exactly"]

# Pieces small enough that an interruption is felt at once.
_PIECE = 16 * 2**20


def read_exactly(
    stream: IO[bytes],
    dtype: np.dtype,
    shape: tuple[int, ...],
    where: str,
    order: Literal["C", "F"] = "C",
) -> np.ndarray:
    """Read the elements of an array of `shape`, in the order that they are in, and return it.

    The caller has checked that the file is large enough to hold them.
    """
    check_elements(shape, where)
    array = np.empty(math.prod(shape), dtype)
    # As bytes: bfloat16 does not speak the buffer protocol.
    view = array.view(np.uint8).data
    done = 0
    while done < len(view):
        piece = stream.read(min(_PIECE, len(view) - done))
        if not piece:
            raise ArgumentValueError(where, "is truncated", came=f"{done} of {len(view)} bytes")
        view[done : done + len(piece)] = piece
        done += len(piece)
    return array.reshape(shape, order=order)


def native(array: np.ndarray) -> np.ndarray:
    """Return `array` in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
