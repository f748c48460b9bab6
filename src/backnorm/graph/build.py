"""Turn a oneDNN graph into a program with named ports and tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from backnorm.dialects import registry
from backnorm.dialects.schema import TensorSpec
from backnorm.errors import ArgumentValueError
from backnorm.graph.model import Graph, Operator
from backnorm.graph.parse import DIALECT
from backnorm.graph.program import Program, Step, Tensor


def build_program(graph: Graph) -> Program:
    """Return the program that runs `graph`.

    A tensor's key is its name, or, without a name, its id in decimal. A tensor may also be supplied
    by its id or by ``operator name.port`` (``bn1.src``). If only one tensor of the graph is at a
    port of that name, the port alone is enough (``src``).
    """
    steps = []
    ports: dict[int, list[str]] = {id_: [] for id_ in graph.tensors}
    keys = {id_: tensor.name or str(id_) for id_, tensor in graph.tensors.items()}
    for operator in graph.operators:
        inputs, outputs = _name_ports(operator)
        for port, id_ in (inputs | outputs).items():
            ports[id_] += [f"{operator.name}.{port}", port]
        steps.append(
            Step(
                DIALECT,
                operator.kind,
                operator.name,
                operator.attributes,
                {port: keys[id_] for port, id_ in inputs.items()},
                {port: keys[id_] for port, id_ in outputs.items()},
            )
        )
    tensors = {
        key: Tensor(key, aliases, tensor.shape, tensor.dtype, tensor.stride)
        for (key, aliases), tensor in zip(
            _aliases(keys, ports), graph.tensors.values(), strict=True
        )
    }
    return Program(tuple(steps), tensors, {keys[id_]: keys[id_] for id_ in graph.outputs})


def _name_ports(operator: Operator) -> tuple[dict[str, int], dict[str, int]]:
    schema = registry.operator(DIALECT, operator.kind).schema
    where = f"{operator.name} ({operator.kind})"
    return (
        _zip_ports(schema.inputs, operator.inputs, f"{where} inputs"),
        _zip_ports(schema.outputs, operator.outputs, f"{where} outputs"),
    )


def _zip_ports(specs: Sequence[TensorSpec], ids: Sequence[int], where: str) -> dict[str, int]:
    """Return port name -> tensor id, by index."""
    required = sum(spec.required for spec in specs)
    if not required <= len(ids) <= len(specs):
        names = ", ".join(spec.name if spec.required else f"[{spec.name}]" for spec in specs)
        raise ArgumentValueError(where, "wrong number of tensors", came=len(ids), accepted=names)
    return {spec.name: id_ for spec, id_ in zip(specs, ids, strict=False)}


def _aliases(
    keys: dict[int, str], ports: dict[int, list[str]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return (key, all names) of each tensor; a name that fits two tensors is left out."""
    primary = Counter(keys.values())
    twice = next((key for key, count in primary.items() if count > 1), None)
    if twice is not None:
        raise ArgumentValueError("graph", f"two logical tensors go by the name {twice!r}")
    names = {id_: dict.fromkeys([keys[id_], str(id_), *(ports[id_])]) for id_ in keys}
    uses = Counter(name for own in names.values() for name in own)
    return [
        (key, (key, *(name for name in names[id_] if name not in primary and uses[name] == 1)))
        for id_, key in keys.items()
    ]
