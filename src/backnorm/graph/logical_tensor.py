"""Parse the logical tensors of oneDNN Graph JSON."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.model import LogicalTensor
from backnorm.graph.strict_json import (
    expect_choice,
    expect_integer,
    expect_key,
    expect_list,
    expect_name,
    expect_object,
    expect_string,
)

DATA_TYPES: dict[str, np.dtype] = {
    "f32": FLOAT32,
    "bf16": BFLOAT16,
    "f16": FLOAT16,
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
}
MAX_ELEMENTS = 2**48
MAX_RANK = 12  # DNNL_MAX_NDIMS

_MAX_ID = 2**64 - 1
# The values of an unknown dimension or stride in oneDNN's files.
_UNKNOWN = (-1, -(2**63))
_LAYOUT_TYPES = ("strided", "any", "undef")
_PROPERTY_TYPES = ("undef", "variable", "constant")


def parse_logical_tensor(value: object, where: str, *, is_output: bool) -> LogicalTensor:
    """Return the logical tensor that the JSON `value` at `where` describes.

    An input must have a known shape; an output may have an unknown one.
    """
    fields = expect_object(value, where)
    layout_type = expect_choice(fields, "layout_type", _LAYOUT_TYPES, where)
    shape = _parse_shape(expect_key(fields, "shape", where), f"{where}.shape")
    if shape is None and not is_output:
        raise ArgumentValueError(f"{where}.shape", "the shape of an input must be known")
    stride = None
    if layout_type == "strided" and shape is not None and "stride" in fields:
        stride = _parse_stride(fields["stride"], shape, f"{where}.stride")
    name = fields.get("name")
    return LogicalTensor(
        id=expect_integer(expect_key(fields, "id", where), f"{where}.id", high=_MAX_ID),
        dtype=_parse_dtype(expect_key(fields, "dtype", where), f"{where}.dtype"),
        shape=shape,
        stride=stride,
        layout_type=layout_type,
        property_type=expect_choice(fields, "property_type", _PROPERTY_TYPES, where),
        name=None if name is None else expect_name(name, f"{where}.name"),
    )


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


def merge(known: LogicalTensor, other: LogicalTensor, where: str) -> LogicalTensor:
    """Merge two descriptions of a tensor; in each of them, some facts may be missing (None)."""
    for attribute in ("dtype", "shape", "stride", "name"):
        first, second = getattr(known, attribute), getattr(other, attribute)
        if first is not None and second is not None and first != second:
            raise ArgumentValueError(
                f"{where}.{attribute}",
                f"differs from an earlier mention of logical tensor {known.id}",
                came=second,
                accepted=first,
            )
    return replace(
        known,
        shape=other.shape if known.shape is None else known.shape,
        stride=other.stride if known.stride is None else known.stride,
        layout_type=other.layout_type if known.stride is None else known.layout_type,
        name=other.name if known.name is None else known.name,
    )


def _parse_dtype(value: object, where: str) -> np.dtype:
    text = expect_string(value, where)
    if text not in DATA_TYPES:
        raise ArgumentTypeError(
            where, "unsupported data type", came=repr(text), accepted=", ".join(DATA_TYPES)
        )
    return DATA_TYPES[text]


def _parse_shape(value: object, where: str) -> tuple[int, ...] | None:
    shape = _parse_sizes(value, where, MAX_ELEMENTS)
    if shape is not None:
        check_elements(shape, where)
    return shape


def _parse_stride(value: object, shape: tuple[int, ...], where: str) -> tuple[int, ...] | None:
    stride = _parse_sizes(value, where, 2**62)
    if stride is not None:
        check_stride(stride, shape, where)
    return stride


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


def _parse_sizes(value: object, where: str, most: int) -> tuple[int, ...] | None:
    """Return the entries of a list, or None if an entry is unknown."""
    entries = expect_list(value, where, most=MAX_RANK)
    if any(type(entry) is int and entry in _UNKNOWN for entry in entries):
        return None
    return tuple(
        expect_integer(entry, f"{where}[{i}]", high=most) for i, entry in enumerate(entries)
    )
