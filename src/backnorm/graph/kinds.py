"""The kinds of operators in a graph: their ports and attributes, and their older names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from backnorm.dialects import registry
from backnorm.dialects.schema import TensorSpec
from backnorm.errors import ArgumentTypeError, shown
from backnorm.graph.pointwise import FLOATS, POINTWISE, Types
from backnorm.graph.program import Step, Tensor

#: The dialect whose names and rules the batch normalisations in a graph follow.
DIALECT = "onednn_graph"

#: Maps the names of operators in oneDNN's graph-v0.9 to their names in oneDNN 3.0 and later.
OLDER_NAMES: Mapping[str, str] = {
    "BatchNormTrainingBackprop": "BatchNormTrainingBackward",
    "ReLUBackprop": "ReLUBackward",
}


_JSON_TYPES = {"f32": (int, float), "s64": (int,), "bool": (bool, int), "string": (str,)}
ATTRIBUTE_TYPES = ("f32", "f32[]", "s64", "s64[]", "bool", "string")


class Port(NamedTuple):
    """An input or output of an operator. It is data, or has one value per channel."""

    name: str
    types: Types
    required: bool = True
    is_data: bool = True


class Kind(NamedTuple):
    """The ports of an operator, in the order of their indices, and the types of its attributes.

    Ports, attributes and types have the names that oneDNN's JSON files use.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    attributes: Mapping[str, str]


def _port(spec: TensorSpec) -> Port:
    return Port(spec.name, FLOATS, spec.required, spec.kind == "data")


def _of_dialect(op: str) -> Kind:
    schema = registry.operator(DIALECT, op).schema
    return Kind(
        tuple(map(_port, schema.inputs)),
        tuple(map(_port, schema.outputs)),
        {attribute.name: attribute.type for attribute in schema.attributes},
    )


KINDS: Mapping[str, Kind] = {op: _of_dialect(op) for op in registry.operators(DIALECT)} | {
    op: Kind(
        tuple(Port(*port) for port in found.inputs.items()),
        tuple(Port(*port) for port in found.outputs.items()),
        found.attributes,
    )
    for op, found in POINTWISE.items()
}


def is_of_type(value: object, type_: str) -> bool:
    """Return whether a JSON value is of a type of oneDNN's attributes, such as ``s64[]``."""
    if type_.endswith("[]"):
        return type(value) is list and all(is_of_type(each, type_[:-2]) for each in value)
    # oneDNN writes booleans as 0 and 1.
    return type(value) in _JSON_TYPES[type_] and (type_ != "bool" or value in (0, 1))


def checked(step: Step, tensors: Mapping[str, Tensor]) -> Step:
    """Check the element types of a step's tensors, and the attributes of an elementwise operator.

    Return the step with all attributes of an elementwise operator. Attributes of a batch
    normalisation are checked when it runs.
    """
    kind, where = KINDS[step.op], f"{step.label} ({step.op})"
    ports = {
        port: tensors[key].dtype for port, key in (*step.inputs.items(), *step.outputs.items())
    }
    types = {port: dtype for port, dtype in ports.items() if dtype is not None}
    for port in (*kind.inputs, *kind.outputs):
        if port.name in types and types[port.name] not in port.types:
            raise ArgumentTypeError(
                f"{where} {port.name}",
                "unsupported element type",
                came=types[port.name],
                accepted=", ".join(map(str, port.types)),
            )
    pointwise = POINTWISE.get(step.op)
    if pointwise is None:
        return step
    if pointwise.one_type and len(set(types.values())) > 1:
        came = ", ".join(f"{port} {dtype}" for port, dtype in types.items())
        raise ArgumentTypeError(where, "tensors differ in type", came=came, accepted="one type")
    for name, value in step.attributes.items():
        if name not in kind.attributes:
            raise ArgumentTypeError(
                f"{step.label}.{name}",
                f"{step.op} has no such attribute",
                accepted=", ".join(kind.attributes) or "none",
            )
        if not is_of_type(value, kind.attributes[name]):
            raise ArgumentTypeError(
                f"{step.label}.{name}",
                "has the wrong type",
                came=shown(value),
                accepted=f"a value of type {kind.attributes[name]}",
            )
    return replace(step, attributes=pointwise.check(step.label, step.attributes, types))
