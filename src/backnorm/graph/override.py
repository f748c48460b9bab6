"""Override shapes, types and attributes of a graph, in the syntax of benchdnn.

Source: oneDNN 3.13, the parser and the rewriting of graphs in tests/benchdnn/graph, and the options
in tests/benchdnn/inputs/graph. If an option has a list of alternatives, benchdnn runs the graph
once with each of them. backnorm runs the graph only once, so it raises an error for such a list.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.kinds import KINDS, checked, is_of_type
from backnorm.graph.logical_tensor import (
    DATA_TYPES,
    check_elements,
    check_rank,
    check_stride,
    parse_type,
)
from backnorm.graph.pointwise import FLOATS
from backnorm.graph.program import Program, Step, Tensor

Named = TypeVar("Named", Step, Tensor)

_SHAPES, _TYPE, _ATTRIBUTES = "--in-shapes", "--dt", "--op-attrs"
#: Options of benchdnn that `backnorm run` does not have, and what to write instead.
REFUSED: Mapping[str, str] = {
    "--graph": "FILE alone",
    "--case": "FILE alone",
    "--batch": "one command for each line of the file",
    "--reset": "nothing: every command begins with the values in FILE",
    "--mb": f"the whole shapes, with {_SHAPES}",
    "--bnorm": "a graph, or a call of an operator; backnorm verify onednn judges the primitive",
    "--op-kind": "a file with the other operator",
    "--tensor-property": "nothing: a tensor's property does not change results",
    "--attr-fpmath": "--arithmetic float32 or float64",
    "--expected-n-partitions": "nothing: there are no partitions",
    "--mode": "--check, or nothing for times alone",
    "--engine": "nothing: the CPU computes",
}
_GRAMMAR = {
    _TYPE: "TYPE, or ID:TYPE joined by +, such as 0:bf16+1:f32",
    _SHAPES: "ID:SHAPE, ID:SHAPE*STRIDES or ID:*STRIDES, joined by +, such as 0:2x8x7x7*acdb+1:8",
    _ATTRIBUTES: "ID:NAME:VALUE*NAME:VALUE..., joined by +, such as 0:data_format:NXC*epsilon:0.1",
}
# These patterns accept ids and sizes of at most 20 digits.
_ID = re.compile(r"[0-9]{1,20}")
_SIZES = re.compile(r"[0-9]{1,20}(x[0-9]{1,20})*")
_FLOAT_TYPES = {name: dtype for name, dtype in DATA_TYPES.items() if dtype in FLOATS}


def override_graph(
    program: Program,
    *,
    in_shapes: str | None = None,
    dt: str | None = None,
    op_attrs: str | None = None,
) -> Program:
    """Return the program of a oneDNN graph with other shapes, types and attributes, by the rules of
    oneDNN's benchdnn.

    Parameters
    ----------
    program : Program
        From `parse_graph`.
    in_shapes : str, optional
        ``ID:SHAPE[*STRIDES]+...``: shapes (``2x192x71x71``) of inputs of the graph, and strides, as
        numbers or as a tag (``acdb``: the axes from the slowest to the fastest). Without strides,
        the tensor is dense in row-major order; ``ID:*STRIDES`` keeps the shape. Other inputs keep
        their shapes. Shapes of computed tensors follow from the operators.
    dt : str, optional
        "f32", "bf16" or "f16": the element type of x, y, dy and dx, and of all tensors of ReLU and
        ReLUBackward. Statistics and parameters keep their types. A graph with Quantize or
        Dequantize is an error. ``ID:TYPE+...``: the types of single tensors, also "s8" and "u8".
    op_attrs : str, optional
        ``ID:NAME:VALUE*NAME:VALUE+...``: attributes of operators, by the operators' ids. Entries
        of a list are joined by x (``zps:1x2``); booleans are 0, 1, false or true.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        For text in another form, an unknown id, strides that do not fit the shape, an attribute
        that the operator does not have, or an unsupported type. The error names benchdnn's option
        (``--dt``).
    """
    tensors = dict(program.tensors)
    if in_shapes is not None:
        tensors |= _with_shapes(program, in_shapes)
    steps = program.steps if op_attrs is None else _with_attributes(program, op_attrs)
    if dt is not None:
        types = _types(program, dt)
        tensors |= {key: replace(tensors[key], dtype=dtype) for key, dtype in types.items()}
    return replace(program, steps=tuple(checked(step, tensors) for step in steps), tensors=tensors)


def _with_shapes(program: Program, text: str) -> dict[str, Tensor]:
    produced = {key for step in program.steps for key in step.outputs.values()}
    inputs = {t.id: t for key, t in program.tensors.items() if key not in produced}
    entries = _entries(_SHAPES, text, inputs, "an input of the graph")
    return {key: replace(program.tensors[key], shape=None, stride=None) for key in produced} | {
        tensor.key: _reshaped(tensor, entry) for tensor, entry in entries
    }


def _reshaped(tensor: Tensor, entry: str) -> Tensor:
    where = f"{_SHAPES} {tensor.id}"
    sizes, star, layout = entry.partition("*")
    shape = tensor.shape
    if sizes or not star:
        shape = _sizes(where, sizes)
        check_rank(shape, where)
        check_elements(shape, where)
    assert shape is not None
    if star and layout.isalpha():
        stride = _tagged(where, layout, shape)
    else:
        stride = _sizes(where, layout) if star else _dense(shape, range(len(shape)))
    check_stride(stride, shape, where)
    return replace(tensor, shape=shape, stride=stride)


def _tagged(where: str, tag: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    letters = "".join(chr(ord("a") + axis) for axis in range(len(shape)))
    if "".join(sorted(tag)) != letters:
        raise ArgumentValueError(
            where, "is not a tag of this rank", came=tag, accepted=f"each of {letters} once"
        )
    return _dense(shape, [letters.index(letter) for letter in tag])


def _dense(shape: tuple[int, ...], order: Any) -> tuple[int, ...]:
    """Return the strides of a dense array whose axes are in memory in `order`, outermost first."""
    stride, step = [0] * len(shape), 1
    for axis in reversed(list(order)):
        stride[axis] = step
        step *= max(shape[axis], 1)
    return tuple(stride)


def _sizes(where: str, text: str) -> tuple[int, ...]:
    if not _SIZES.fullmatch(text):
        raise ArgumentValueError(where, "cannot be read", came=text, accepted=_GRAMMAR[_SHAPES])
    return tuple(map(int, text.split("x")))


def _types(program: Program, text: str) -> dict[str, np.dtype]:
    """Return the types that `text` gives to tensors, by their keys."""
    if ":" in text:
        tensors = {tensor.id: tensor for tensor in program.tensors.values()}
        return {
            tensor.key: parse_type(name, f"{_TYPE} {tensor.id}", DATA_TYPES)
            for tensor, name in _entries(_TYPE, text, tensors, "a tensor of the graph")
        }
    dtype = parse_type(text, _TYPE, _FLOAT_TYPES)
    return {
        key: dtype
        for step in program.steps
        for port in (*KINDS[step.op].inputs, *KINDS[step.op].outputs)
        if port.is_data
        and (key := step.inputs.get(port.name) or step.outputs.get(port.name)) is not None
    }


def _with_attributes(program: Program, text: str) -> list[Step]:
    steps = {step.id: step for step in program.steps}
    for step, entry in _entries(_ATTRIBUTES, text, steps, "an operator"):
        steps[step.id] = replace(step, attributes={**step.attributes, **_values(step, entry)})
    return [*steps.values()]


def _values(step: Step, text: str) -> dict[str, object]:
    where, known = f"{_ATTRIBUTES} {step.id}", KINDS[step.op].attributes
    values = {}
    for entry in text.split("*"):
        name, colon, value = entry.partition(":")
        if not colon or not value:
            raise ArgumentValueError(
                where, "cannot be read", came=entry, accepted=_GRAMMAR[_ATTRIBUTES]
            )
        if name not in known:
            raise ArgumentValueError(
                where,
                f"{step.op} has no such attribute",
                came=name,
                accepted=", ".join(known) or "none",
            )
        values[name] = _value(f"{where}:{name}", known[name], value)
    return values


def _value(where: str, type_: str, text: str) -> object:
    """Return the value of an attribute; the entries of a list are joined by x."""
    entries: list[object] = [*text.split("x")] if type_.endswith("[]") else [text]
    if "string" not in type_:
        # A text that is no JSON stays a string, which is not of the type.
        with suppress(ValueError, RecursionError):
            entries = [json.loads(str(entry)) for entry in entries]
    value = entries if type_.endswith("[]") else entries[0]
    if not is_of_type(value, type_):
        raise ArgumentTypeError(
            where, "cannot be read", came=text, accepted=f"a value of type {type_}"
        )
    return value


def _entries(
    option: str, text: str, known: Mapping[int | None, Named], noun: str
) -> list[tuple[Named, str]]:
    """Return what ID names in `known`, and TEXT, for each entry of an option such as
    "ID:TEXT+ID:TEXT".
    """
    if "," in text:
        raise ArgumentValueError(
            option, "has a list of alternatives", came=text, accepted="one alternative per run"
        )
    entries: dict[int, str] = {}
    for entry in text.split("+"):
        digits, colon, rest = entry.partition(":")
        if not (_ID.fullmatch(digits) and colon and rest):
            raise ArgumentValueError(
                option, "cannot be read", came=repr(entry), accepted=_GRAMMAR[option]
            )
        id_ = int(digits)
        if id_ not in known:
            raise ArgumentValueError(
                option, f"not the id of {noun}", came=id_, accepted=", ".join(map(str, known))
            )
        if id_ in entries:
            raise ArgumentValueError(option, f"{noun} occurs twice", came=id_)
        entries[id_] = rest
    return [(known[id_], rest) for id_, rest in entries.items()]
