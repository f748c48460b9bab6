"""Turn a oneDNN graph into a program with named ports and tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.fuse import fused, notes
from backnorm.graph.kinds import DIALECT, KINDS, Port
from backnorm.graph.model import Graph, Operator
from backnorm.graph.pointwise import POINTWISE
from backnorm.graph.program import Program, Step, Tensor


def build_program(graph: Graph, *, fuse: bool = True) -> Program:
    """Return the program that runs `graph`.

    The key of a tensor is the tensor's name, or the tensor's id if it has no name. A tensor may
    also be supplied by its id or by ``OPERATOR.PORT`` (``bn1.src``). The port alone (``src``) is
    enough if only one tensor of the graph is at a port of that name.

    Parameters
    ----------
    graph : Graph
    fuse : bool
        Whether to fuse a normalisation with the ReLU after it, and a ReLUBackward with the
        BatchNormTrainingBackward whose `diff_dst` it produces, if nothing else reads the tensor
        between the two operators. The results have the same bits.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If an operator has a wrong number of tensors, a tensor of an unsupported type, or a wrong
        attribute. Attributes of a batch normalisation are checked when it runs.
    """
    steps = []
    ports: dict[int, list[str]] = {id_: [] for id_ in graph.tensors}
    keys = {id_: tensor.name or str(id_) for id_, tensor in graph.tensors.items()}
    for operator in graph.operators:
        inputs, outputs = _name_ports(operator)
        for port, id_ in (inputs | outputs).items():
            ports[id_] += [f"{operator.name}.{port}", port]
        types = {port: graph.tensors[id_].dtype for port, id_ in (inputs | outputs).items()}
        _check_types(operator, types)
        steps.append(
            Step(
                DIALECT,
                operator.kind,
                operator.name,
                _attributes(operator, types),
                {port: keys[id_] for port, id_ in inputs.items()},
                {port: keys[id_] for port, id_ in outputs.items()},
                types[next(iter(outputs))],
            )
        )
    tensors = {
        key: Tensor(key, aliases, tensor.shape, tensor.dtype, tensor.stride)
        for (key, aliases), tensor in zip(
            _aliases(keys, ports), graph.tensors.values(), strict=True
        )
    }
    program = Program(tuple(steps), tensors, {keys[id_]: keys[id_] for id_ in graph.outputs})
    program = replace(program, notes=(*graph.notes, *notes(program)))
    return fused(program) if fuse else program


def _name_ports(operator: Operator) -> tuple[dict[str, int], dict[str, int]]:
    kind = KINDS[operator.kind]
    where = f"{operator.name} ({operator.kind})"
    return (
        _zip_ports(kind.inputs, operator.inputs, f"{where} inputs"),
        _zip_ports(kind.outputs, operator.outputs, f"{where} outputs"),
    )


def _zip_ports(ports: Sequence[Port], ids: Sequence[int], where: str) -> dict[str, int]:
    """Return a mapping from port names to tensor ids: each port gets the id at its own index."""
    required = sum(port.required for port in ports)
    if not required <= len(ids) <= len(ports):
        names = ", ".join(port.name if port.required else f"[{port.name}]" for port in ports)
        raise ArgumentValueError(where, "wrong number of tensors", came=len(ids), accepted=names)
    return {port.name: id_ for port, id_ in zip(ports, ids, strict=False)}


def _check_types(operator: Operator, types: Mapping[str, np.dtype]) -> None:
    kind = KINDS[operator.kind]
    where = f"{operator.name} ({operator.kind})"
    for port in (*kind.inputs, *kind.outputs):
        if port.name in types and types[port.name] not in port.types:
            raise ArgumentTypeError(
                f"{where} {port.name}",
                "unsupported element type",
                came=types[port.name],
                accepted=", ".join(map(str, port.types)),
            )
    pointwise = POINTWISE.get(operator.kind)
    if pointwise is not None and pointwise.one_type and len(set(types.values())) > 1:
        came = ", ".join(f"{port} {dtype}" for port, dtype in types.items())
        raise ArgumentTypeError(where, "tensors differ in type", came=came, accepted="one type")


def _attributes(operator: Operator, types: Mapping[str, np.dtype]) -> Mapping[str, object]:
    """Return the attributes of `operator`; those of an elementwise operator are checked first."""
    pointwise = POINTWISE.get(operator.kind)
    if pointwise is None:
        return operator.attributes
    for name in operator.attributes:
        if name not in pointwise.attributes:
            raise ArgumentTypeError(
                f"{operator.name}.{name}",
                f"{operator.kind} has no such attribute",
                accepted=", ".join(pointwise.attributes) or "none",
            )
    return pointwise.check(operator.name, operator.attributes, types)


def _aliases(
    keys: dict[int, str], ports: dict[int, list[str]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return the key and all names of each tensor. A name that two tensors have is left out."""
    primary = Counter(keys.values())
    twice = next((key for key, count in primary.items() if count > 1), None)
    if twice is not None:
        raise ArgumentValueError("graph", f"two logical tensors have the name {twice!r}")
    names = {id_: dict.fromkeys([keys[id_], str(id_), *(ports[id_])]) for id_ in keys}
    uses = Counter(name for own in names.values() for name in own)
    return [
        (key, (key, *(name for name in names[id_] if name not in primary and uses[name] == 1)))
        for id_, key in keys.items()
    ]
