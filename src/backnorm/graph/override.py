"""Override shapes, types and attributes of a graph, in the syntax of benchdnn.

Source: oneDNN 3.13, the parser and the rewriting of graphs in tests/benchdnn/graph, and the options
in tests/benchdnn/inputs/graph. If an option has a list of alternatives, benchdnn runs the graph
once with each of them. backnorm runs the graph only once, so it raises an error for such a list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.kinds import KINDS
from backnorm.graph.logical_tensor import DATA_TYPES, MAX_RANK, check_elements, check_stride
from backnorm.graph.model import Graph, LogicalTensor, Operator
from backnorm.graph.pointwise import FLOATS

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
    graph: Graph,
    *,
    in_shapes: str | None = None,
    dt: str | None = None,
    op_attrs: str | None = None,
) -> Graph:
    """Return `graph` with other shapes, types and attributes, by the rules of oneDNN's benchdnn.

    Parameters
    ----------
    graph : Graph
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
    if in_shapes is not None:
        graph = _with_shapes(graph, in_shapes)
    if op_attrs is not None:
        graph = _with_attributes(graph, op_attrs)
    return graph if dt is None else _with_type(graph, dt)


def _with_shapes(graph: Graph, text: str) -> Graph:
    produced = {id_ for operator in graph.operators for id_ in operator.outputs}
    inputs = [id_ for id_ in graph.tensors if id_ not in produced]
    tensors = {
        id_: replace(tensor, shape=None, stride=None) if id_ in produced else tensor
        for id_, tensor in graph.tensors.items()
    }
    for id_, entry in _entries(_SHAPES, text, inputs, "an input of the graph").items():
        tensors[id_] = _reshaped(tensors[id_], entry)
    return replace(graph, tensors=tensors)


def _reshaped(tensor: LogicalTensor, entry: str) -> LogicalTensor:
    where = f"{_SHAPES} {tensor.id}"
    sizes, star, layout = entry.partition("*")
    shape = tensor.shape
    if sizes or not star:
        shape = _sizes(where, sizes)
        if len(shape) > MAX_RANK:
            raise ArgumentValueError(
                where, "has too many dimensions", came=len(shape), accepted=f"at most {MAX_RANK}"
            )
        check_elements(shape, where)
    assert shape is not None
    if star and layout.isalpha():
        stride = _tagged(where, layout, shape)
    else:
        stride = _sizes(where, layout) if star else _dense(shape, range(len(shape)))
    check_stride(stride, shape, where)
    return replace(tensor, shape=shape, stride=stride, layout_type="strided")


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


def _with_type(graph: Graph, text: str) -> Graph:
    tensors = dict(graph.tensors)
    if ":" in text:
        for id_, name in _entries(_TYPE, text, list(tensors), "a tensor of the graph").items():
            dtype = _type(f"{_TYPE} {id_}", name, DATA_TYPES)
            tensors[id_] = replace(tensors[id_], dtype=dtype)
        return replace(graph, tensors=tensors)
    dtype = _type(_TYPE, text, _FLOAT_TYPES)
    for operator in graph.operators:
        if operator.kind in ("Quantize", "Dequantize"):
            raise ArgumentValueError(
                _TYPE,
                "cannot change the types of a quantised graph",
                came=f"{operator.name} ({operator.kind})",
                accepted="a graph without Quantize and Dequantize",
            )
        kind = KINDS[operator.kind]
        pairs = [*zip(kind.inputs, operator.inputs), *zip(kind.outputs, operator.outputs)]  # noqa: B905
        for port, id_ in pairs:
            if port.is_data:
                tensors[id_] = replace(tensors[id_], dtype=dtype)
    return replace(graph, tensors=tensors)


def _type(where: str, text: str, known: Mapping[str, np.dtype]) -> np.dtype:
    if text not in known:
        raise ArgumentTypeError(
            where, "unsupported data type", came=text, accepted=", ".join(known)
        )
    return known[text]


def _with_attributes(graph: Graph, text: str) -> Graph:
    operators = {operator.id: operator for operator in graph.operators}
    for id_, entry in _entries(_ATTRIBUTES, text, list(operators), "an operator").items():
        operators[id_] = _with_values(operators[id_], entry)
    return replace(graph, operators=tuple(operators.values()))


def _with_values(operator: Operator, text: str) -> Operator:
    where, known = f"{_ATTRIBUTES} {operator.id}", KINDS[operator.kind].attributes
    attributes = dict(operator.attributes)
    for entry in text.split("*"):
        name, colon, value = entry.partition(":")
        if not colon or not value:
            raise ArgumentValueError(
                where, "cannot be read", came=entry, accepted=_GRAMMAR[_ATTRIBUTES]
            )
        if name not in known:
            raise ArgumentValueError(
                where,
                f"{operator.kind} has no such attribute",
                came=name,
                accepted=", ".join(known) or "none",
            )
        attributes[name] = _value(f"{where}:{name}", known[name], value)
    return replace(operator, attributes=attributes)


def _value(where: str, type_: str, text: str) -> object:
    try:
        return _READ[type_](text)
    except (ValueError, KeyError):
        raise ArgumentTypeError(
            where, "cannot be read", came=text, accepted=f"a value of type {type_}"
        ) from None


def _entries(option: str, text: str, known: list[int], noun: str) -> dict[int, str]:
    """Return {ID: TEXT} for an option whose value is `text`, such as "ID:TEXT+ID:TEXT"."""
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
    return entries


def _list_of(read: Callable[[str], object]) -> Callable[[str], object]:
    return lambda text: [read(entry) for entry in text.split("x")]


def _number(text: str) -> float:
    value = float(text)
    if not np.isfinite(value):
        raise ValueError
    return value


_READ: Mapping[str, Callable[[str], object]] = {
    "f32": _number,
    "f32[]": _list_of(_number),
    "s64": int,
    "s64[]": _list_of(int),
    "bool": {"0": False, "false": False, "1": True, "true": True}.__getitem__,
    "string": str,
}
