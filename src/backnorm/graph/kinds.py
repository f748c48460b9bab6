"""The kinds of operators in a graph: their ports and attributes, and their older names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from backnorm.dialects import registry
from backnorm.dialects.schema import TensorSpec
from backnorm.graph.pointwise import FLOATS, POINTWISE, Types

#: The dialect whose names and rules the batch normalisations in a graph follow.
DIALECT = "onednn_graph"

#: Maps the names of operators in oneDNN's graph-v0.9 to their names in oneDNN 3.0 and later.
OLDER_NAMES: Mapping[str, str] = {
    "BatchNormTrainingBackprop": "BatchNormTrainingBackward",
    "ReLUBackprop": "ReLUBackward",
}


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
