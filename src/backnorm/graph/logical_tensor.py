"""Parse the shapes, strides and types of tensors in JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sized
from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.program import check_name
from backnorm.graph.strict_json import expect

DATA_TYPES: dict[str, np.dtype] = {
    "f32": FLOAT32,
    "bf16": BFLOAT16,
    "f16": FLOAT16,
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
}
MAX_ELEMENTS = 2**48
# The limit of NumPy before NumPy 2.
MAX_RANK = 32

# The values of an unknown dimension or stride in oneDNN's files.
_UNKNOWN = (-1, -(2**63))


def parse_logical_tensor(
    value: object, where: str, *, is_output: bool
) -> tuple[int, dict[str, Any]]:
    """Return the id of the logical tensor that the JSON `value` at `where` describes, and its
    dtype, shape, stride and name; of an output, None for what is unknown.
    """
    fields = expect(value, dict, where)
    shape = parse_shape(fields.get("shape"), f"{where}.shape", is_output=is_output)
    stride, name = None, fields.get("name")
    strided = fields.get("layout_type", "strided") == "strided"
    if strided and shape is not None and "stride" in fields:
        stride = _parse_sizes(fields["stride"], f"{where}.stride")
        if stride is not None:
            check_stride(stride, shape, f"{where}.stride")
    return expect(fields.get("id"), int, f"{where}.id"), {
        "dtype": parse_type(fields.get("dtype"), f"{where}.dtype", DATA_TYPES),
        "shape": shape,
        "stride": stride,
        "name": None if name is None else check_name(name, f"{where}.name"),
    }


def parse_type(value: object, where: str, known: Mapping[str, np.dtype]) -> np.dtype:
    """Return the element type that `known` has for a name."""
    text = expect(value, str, where)
    if text not in known:
        raise ArgumentTypeError(
            where, "unsupported data type", came=repr(text), accepted=", ".join(known)
        )
    return known[text]


def parse_shape(value: object, where: str, *, is_output: bool = False) -> tuple[int, ...] | None:
    """Return a shape; None for an output whose shape is unknown."""
    shape = _parse_sizes(value, where)
    if shape is not None:
        check_elements(shape, where)
    elif not is_output:
        raise ArgumentValueError(where, "the shape of an input must be known")
    return shape


def check_elements(shape: tuple[int, ...], where: str) -> None:
    """Raise if an array of `shape` would have more than `MAX_ELEMENTS` elements.

    The number of elements is computed without the dimensions that are 0, for two reasons. First,
    even if a dimension is 0, NumPy raises an error if the product of the other dimensions is too
    large. Second, an array with one value per channel has elements even if the tensor is empty.
    """
    if math.prod(dim for dim in shape if dim) > MAX_ELEMENTS:
        raise ArgumentValueError(
            where, "has too many elements", came=list(shape), accepted=f"at most {MAX_ELEMENTS}"
        )


def check_stride(stride: tuple[int, ...], shape: tuple[int, ...], where: str) -> None:
    """Raise if `stride` does not fit `shape`, or if two elements would share memory."""
    if len(stride) != len(shape):
        raise ArgumentValueError(
            where,
            "must have one entry per dimension of shape",
            came=list(stride),
            accepted=f"{len(shape)} entries for shape {list(shape)}",
        )
    extent = 1
    for step, dim in sorted(zip(stride, shape, strict=True)) if 0 not in shape else ():
        if dim > 1 and step < extent:
            raise ArgumentValueError(
                where,
                "two elements would share a place in memory",
                came=f"stride {list(stride)} for shape {list(shape)}",
                accepted="each stride at least the extent of the dimensions inside it",
            )
        if dim > 1:
            extent = step * dim


def check_rank(shape: Sized, where: str) -> None:
    """Raise if `shape` has more dimensions than NumPy's arrays may have."""
    if len(shape) > MAX_RANK:
        raise ArgumentValueError(
            where, "has too many dimensions", came=len(shape), accepted=f"at most {MAX_RANK}"
        )


def _parse_sizes(value: object, where: str) -> tuple[int, ...] | None:
    """Return the entries of a list, or None if an entry is unknown."""
    entries = expect(value, list, where)
    check_rank(entries, where)
    if any(type(entry) is int and entry in _UNKNOWN for entry in entries):
        return None
    sizes = tuple(expect(entry, int, f"{where}[{i}]") for i, entry in enumerate(entries))
    for i, size in enumerate(sizes):
        if size < 0:
            raise ArgumentValueError(f"{where}[{i}]", "must not be negative", came=size)
    return sizes
