"""Parse and validate oneDNN Graph JSON (the version 3 layout that oneDNN itself writes)."""

from __future__ import annotations

from backnorm.errors import ArgumentValueError
from backnorm.graph.attributes import parse_attributes
from backnorm.graph.kinds import KINDS, OLDER_NAMES
from backnorm.graph.logical_tensor import merge, parse_logical_tensor
from backnorm.graph.model import Graph, LogicalTensor, Operator
from backnorm.graph.order import topological_order
from backnorm.graph.strict_json import (
    expect_integer,
    expect_list,
    expect_object,
    expect_string,
)

_MAX_ID = 2**64 - 1
_MAX_OPERATORS = 10_000
_MAX_PORTS = 64


def parse_graph(document: object, where: str = "graph file") -> Graph:
    """Return the graph that a JSON document describes.

    Parameters
    ----------
    document : object
        The parsed JSON: an object with ``version`` ("3..."), ``graph`` (a list of operators) and,
        optionally, ``output_ports`` (the ids of the tensors to return). Other keys
        (``engine_kind``, ``fpmath_mode``, ``input_ports``) are ignored.
    where : str
        The name of the document in errors.

    Raises
    ------
    ArgumentError
        If the document is invalid. The error names the place in the document, the value and the
        accepted values.
    """
    fields = expect_object(document, where)
    _check_version(fields, where)
    entries = expect_list(fields.get("graph"), "graph", most=_MAX_OPERATORS)
    if not entries:
        raise ArgumentValueError("graph", "has no operators")
    tensors: dict[int, LogicalTensor] = {}
    operators = [_parse_operator(e, f"graph[{i}]", tensors) for i, e in enumerate(entries)]
    seen: set[int] = set()
    for i, operator in enumerate(operators):
        if operator.id in seen:
            raise ArgumentValueError(
                f"graph[{i}].id", "two operators have this id", came=operator.id
            )
        seen.add(operator.id)
    ordered = topological_order(operators)
    return Graph(ordered, tensors, _graph_outputs(fields, ordered))


def _check_version(fields: dict[str, object], where: str) -> None:
    if "version" not in fields:
        raise ArgumentValueError(where, "lacks the key 'version'", accepted="'3.x.y'")
    version = expect_string(fields["version"], "version")
    if version.split(".")[0] != "3":
        raise ArgumentValueError(
            "version", "unsupported version of the graph format", came=version, accepted="3.x.y"
        )


def _parse_operator(value: object, where: str, tensors: dict[int, LogicalTensor]) -> Operator:
    fields = expect_object(value, where)
    name = expect_string(fields.get("kind"), f"{where}.kind")
    kind = OLDER_NAMES.get(name, name)
    if kind not in KINDS:
        raise ArgumentValueError(
            f"{where}.kind",
            "unknown operator",
            came=repr(name),
            accepted=", ".join((*KINDS, *OLDER_NAMES)),
        )
    ports: dict[str, tuple[int, ...]] = {}
    for key in ("inputs", "outputs"):
        ids = []
        for i, entry in enumerate(expect_list(fields.get(key), f"{where}.{key}", most=_MAX_PORTS)):
            at = f"{where}.{key}[{i}]"
            tensor = parse_logical_tensor(entry, at, is_output=key == "outputs")
            earlier = tensors.get(tensor.id)
            tensors[tensor.id] = tensor if earlier is None else merge(earlier, tensor, at)
            ids.append(tensor.id)
        ports[key] = tuple(ids)
    return Operator(
        id=expect_integer(fields.get("id"), f"{where}.id", high=_MAX_ID),
        name=expect_string(fields.get("name", kind), f"{where}.name"),
        kind=kind,
        attributes=parse_attributes(fields.get("attrs", {}), f"{where}.attrs"),
        inputs=ports["inputs"],
        outputs=ports["outputs"],
    )


def _graph_outputs(fields: dict[str, object], operators: tuple[Operator, ...]) -> tuple[int, ...]:
    """Return the declared outputs; if none are declared, all results that no operator consumes."""
    produced = dict.fromkeys(id_ for operator in operators for id_ in operator.outputs)
    declared = expect_list(fields.get("output_ports", []), "output_ports")
    if not declared:
        consumed = {id_ for operator in operators for id_ in operator.inputs}
        return tuple(id_ for id_ in produced if id_ not in consumed)
    outputs = []
    for i, entry in enumerate(declared):
        id_ = expect_integer(entry, f"output_ports[{i}]", high=_MAX_ID)
        if id_ not in produced:
            raise ArgumentValueError(
                f"output_ports[{i}]", "no operator produces this logical tensor", came=id_
            )
        outputs.append(id_)
    return tuple(dict.fromkeys(outputs))
