"""Parse the logical tensors of oneDNN Graph JSON."""

from __future__ import annotations

import math

import numpy as np

from backnorm.dtypes import BFLOAT16, FLOAT16, FLOAT32
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.model import LogicalTensor
from backnorm.graph.strict_json import (
    expect_integer,
    expect_list,
    expect_name,
    expect_object,
    expect_string,
)

__all__ = ["DATA_TYPES", "MAX_ELEMENTS", "check_elements", "merge", "parse_logical_tensor"]

DATA_TYPES: dict[str, np.dtype] = {"f32": FLOAT32, "bf16": BFLOAT16, "f16": FLOAT16}
MAX_ELEMENTS = 2**48

_MAX_RANK = 12  # DNNL_MAX_NDIMS
_MAX_ID = 2**64 - 1
# What oneDNN writes for a dimension or a stride that shape inference has yet to fill in.
_UNKNOWN = (-1, -(2**63))
_LAYOUT_TYPES = ("strided", "any", "undef")
_PROPERTY_TYPES = ("undef", "variable", "constant")


def parse_logical_tensor(value: object, where: str, *, is_output: bool) -> LogicalTensor:
    """Return the logical tensor that the JSON `value` at `where` describes.

    The shape of an input must be known; that of an output may be left to the operator.
    """
    fields = expect_object(value, where)
    layout_type = _one_of(fields, "layout_type", _LAYOUT_TYPES, where)
    shape = _parse_shape(_required(fields, "shape", where), f"{where}.shape")
    if shape is None and not is_output:
        raise ArgumentValueError(f"{where}.shape", "the shape of an input must be known")
    stride = None
    if layout_type == "strided" and shape is not None and "stride" in fields:
        stride = _parse_stride(fields["stride"], shape, f"{where}.stride")
    name = fields.get("name")
    return LogicalTensor(
        id=expect_integer(_required(fields, "id", where), f"{where}.id", low=0, high=_MAX_ID),
        dtype=_parse_dtype(_required(fields, "dtype", where), f"{where}.dtype"),
        shape=shape,
        stride=stride,
        layout_type=layout_type,
        property_type=_one_of(fields, "property_type", _PROPERTY_TYPES, where),
        name=None if name is None else expect_name(name, f"{where}.name"),
    )


def check_elements(shape: tuple[int, ...], where: str) -> None:
    """Raise if an array of `shape` would have more than `MAX_ELEMENTS` elements.

    Zeros are left out: an empty array's other dimensions count too, for NumPy, which cannot have
    every empty array, and because they size the parameters.
    """
    if math.prod(dim for dim in shape if dim) > MAX_ELEMENTS:
        raise ArgumentValueError(
            where, "has too many elements", came=list(shape), accepted=f"at most {MAX_ELEMENTS}"
        )


def merge(known: LogicalTensor, other: LogicalTensor, where: str) -> LogicalTensor:
    """Return the one tensor that two mentions of an id describe, each filling the other's gaps."""
    for attribute in ("dtype", "shape", "stride", "name"):
        first, second = getattr(known, attribute), getattr(other, attribute)
        if first is not None and second is not None and first != second:
            raise ArgumentValueError(
                f"{where}.{attribute}",
                f"differs from an earlier mention of logical tensor {known.id}",
                came=second,
                accepted=first,
            )
    return LogicalTensor(
        id=known.id,
        dtype=known.dtype,
        shape=other.shape if known.shape is None else known.shape,
        stride=other.stride if known.stride is None else known.stride,
        layout_type=other.layout_type if known.stride is None else known.layout_type,
        property_type=known.property_type,
        name=other.name if known.name is None else known.name,
    )


def _required(fields: dict[str, object], key: str, where: str) -> object:
    if key not in fields:
        raise ArgumentValueError(where, f"lacks the key {key!r}")
    return fields[key]


def _one_of(fields: dict[str, object], key: str, accepted: tuple[str, ...], where: str) -> str:
    value = expect_string(fields.get(key, accepted[0]), f"{where}.{key}")
    if value not in accepted:
        raise ArgumentValueError(
            f"{where}.{key}", "is not supported", came=repr(value), accepted=", ".join(accepted)
        )
    return value


def _parse_dtype(value: object, where: str) -> np.dtype:
    text = expect_string(value, where)
    if text not in DATA_TYPES:
        raise ArgumentTypeError(
            where, "unsupported data type", came=repr(text), accepted=", ".join(DATA_TYPES)
        )
    return DATA_TYPES[text]


def _parse_shape(value: object, where: str) -> tuple[int, ...] | None:
    dims = expect_list(value, where, most=_MAX_RANK)
    if any(type(dim) is int and dim in _UNKNOWN for dim in dims):
        return None
    shape = tuple(
        expect_integer(dim, f"{where}[{i}]", low=0, high=MAX_ELEMENTS) for i, dim in enumerate(dims)
    )
    check_elements(shape, where)
    return shape


def _parse_stride(value: object, shape: tuple[int, ...], where: str) -> tuple[int, ...] | None:
    """Return the strides of `shape`, having checked that no two elements share a place."""
    entries = expect_list(value, where, most=_MAX_RANK)
    if any(type(entry) is int and entry in _UNKNOWN for entry in entries):
        return None
    stride = tuple(
        expect_integer(entry, f"{where}[{i}]", low=0, high=2**62) for i, entry in enumerate(entries)
    )
    if len(stride) != len(shape):
        raise ArgumentValueError(
            where,
            "must have one entry per dimension of shape",
            came=list(stride),
            accepted=f"{len(shape)} entries for shape {list(shape)}",
        )
    if 0 in shape:
        return stride
    extent = 1
    for step, dim in sorted((s, d) for s, d in zip(stride, shape, strict=True) if d > 1):
        if step < extent:
            raise ArgumentValueError(
                where,
                "two elements would share a place in memory",
                came=f"stride {list(stride)} for shape {list(shape)}",
                accepted="each stride at least the extent of the dimensions inside it",
            )
        extent = step * dim
    return stride
