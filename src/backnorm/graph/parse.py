"""Parse and validate oneDNN Graph JSON (the version 3 layout that oneDNN itself writes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from backnorm.errors import ArgumentValueError, counted
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


def parse_graph(document: object, where: str = "graph file", *, only_known: bool = False) -> Graph:
    """Return the graph that a JSON document describes.

    Parameters
    ----------
    document : object
        The parsed JSON: an object with ``version`` ("3..."), ``graph`` (a list of operators) and,
        optionally, ``output_ports`` (the ids of the tensors to return). Other keys
        (``engine_kind``, ``fpmath_mode``, ``input_ports``) are ignored.
    where : str
        The name of the document in errors.
    only_known : bool
        Whether to leave out the operators of unknown kinds, with a note in the graph. Tensors that
        only these operators produce become inputs of the graph. Tensors that they read become
        results, if an operator of the graph produces them.

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
    operators: list[Operator] = []
    left_out: list[tuple[str, Collection[int]]] = []
    for i, entry in enumerate(entries):
        at = f"graph[{i}]"
        described = expect_object(entry, at)
        name = expect_string(described.get("kind"), f"{at}.kind")
        kind = OLDER_NAMES.get(name, name)
        if kind in KINDS:
            operators.append(_parse_operator(described, kind, at, tensors))
        elif only_known:
            left_out.append((kind, _ids_read(described, at)))
        else:
            raise ArgumentValueError(
                f"{at}.kind",
                "unknown operator",
                came=repr(name),
                accepted=", ".join((*KINDS, *OLDER_NAMES)),
                hint="--only-known (in Python: only_known=True) leaves it out",
            )
    if not operators:
        came = ", ".join(dict.fromkeys(kind for kind, _ in left_out))
        raise ArgumentValueError(
            "graph", "has no known operator", came=came, accepted=", ".join(KINDS)
        )
    seen: set[int] = set()
    for i, operator in enumerate(operators):
        if operator.id in seen:
            raise ArgumentValueError(
                f"graph[{i}].id", "two operators have this id", came=operator.id
            )
        seen.add(operator.id)
    ordered = topological_order(operators)
    read = dict.fromkeys(id_ for _, ids in left_out for id_ in ids) if left_out else None
    return Graph(ordered, tensors, _graph_outputs(fields, ordered, read), _notes(left_out))


def _notes(left_out: Collection[tuple[str, object]]) -> tuple[str, ...]:
    """Return a note that counts the operators that were left out, if any."""
    counts = Counter(kind for kind, _ in left_out)
    kinds = ", ".join(f"{kind} ({number})" for kind, number in counts.items())
    return (f"left out {counted(len(left_out), 'operator')}: {kinds}",) if kinds else ()


def _check_version(fields: dict[str, object], where: str) -> None:
    if "version" not in fields:
        raise ArgumentValueError(where, "lacks the key 'version'", accepted="'3.x.y'")
    version = expect_string(fields["version"], "version")
    if version.split(".")[0] != "3":
        raise ArgumentValueError(
            "version", "unsupported version of the graph format", came=version, accepted="3.x.y"
        )


def _ids_read(fields: dict[str, object], where: str) -> list[int]:
    """Return the ids of the tensors that an operator of an unknown kind reads."""
    ids = []
    for i, entry in enumerate(expect_list(fields.get("inputs", []), f"{where}.inputs")):
        at = f"{where}.inputs[{i}]"
        ids.append(expect_integer(expect_object(entry, at).get("id"), f"{at}.id", high=_MAX_ID))
    return ids


def _parse_operator(
    fields: dict[str, object], kind: str, where: str, tensors: dict[int, LogicalTensor]
) -> Operator:
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


def _graph_outputs(
    fields: dict[str, object],
    operators: tuple[Operator, ...],
    read_by_others: Collection[int] | None,
) -> tuple[int, ...]:
    """Return the declared outputs; if none are declared, all results that no operator consumes.

    If operators were left out, `read_by_others` are the tensors that they read. These tensors are
    outputs, too, and the outputs of the operators that were left out are not.
    """
    produced = dict.fromkeys(id_ for operator in operators for id_ in operator.outputs)
    declared = expect_list(fields.get("output_ports", []), "output_ports")
    if not declared:
        consumed = {id_ for operator in operators for id_ in operator.inputs}
        consumed.difference_update(read_by_others or ())
        return tuple(id_ for id_ in produced if id_ not in consumed)
    outputs = []
    for i, entry in enumerate(declared):
        id_ = expect_integer(entry, f"output_ports[{i}]", high=_MAX_ID)
        if id_ not in produced and read_by_others is None:
            raise ArgumentValueError(
                f"output_ports[{i}]", "no operator produces this logical tensor", came=id_
            )
        outputs.append(id_)
    outputs += read_by_others or ()
    return tuple(id_ for id_ in dict.fromkeys(outputs) if id_ in produced)
