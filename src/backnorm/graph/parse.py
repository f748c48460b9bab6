"""Parse and validate oneDNN Graph JSON (the version 3 layout that oneDNN itself writes)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from backnorm.errors import ArgumentTypeError, ArgumentValueError, counted
from backnorm.graph.kinds import (
    ATTRIBUTE_TYPES,
    DIALECT,
    KINDS,
    OLDER_NAMES,
    Port,
    checked,
    is_of_type,
)
from backnorm.graph.logical_tensor import parse_logical_tensor
from backnorm.graph.order import topological_order
from backnorm.graph.program import Program, Step, Tensor
from backnorm.graph.strict_json import expect

# The dtype, shape, stride and name of each logical tensor, by id; None for what is unknown.
_Facts = dict[str, dict[str, Any]]


def parse_graph(
    document: object, where: str = "graph file", *, only_known: bool = False
) -> Program:
    """Return the program that runs the oneDNN graph in a JSON document.

    The key of a tensor is the tensor's name, or the tensor's id if it has no name. A tensor may
    also be supplied by its id or by ``OPERATOR.PORT`` (``bn1.src``). The port alone (``src``) is
    enough if only one tensor of the graph is at a port of that name.

    Parameters
    ----------
    document : object
        The parsed JSON: an object with ``version`` ("3..."), ``graph`` (a list of operators) and,
        optionally, ``output_ports`` (the ids of the tensors to return). Other keys
        (``engine_kind``, ``fpmath_mode``, ``input_ports``) are ignored.
    where : str
        The name of the document in errors.
    only_known : bool
        Whether to leave out the operators of unknown kinds, with a note in the program. Tensors
        that only these operators produce become inputs of the program. Tensors that they read
        become results, if an operator of the program produces them.

    Raises
    ------
    ArgumentError
        If the document is invalid. The error names the place in the document, the value and the
        accepted values. Attributes of a batch normalisation are checked when it runs.
    """
    fields = expect(document, dict, where)
    version = expect(fields.get("version"), str, "version")
    if version.split(".")[0] != "3":
        raise ArgumentValueError(
            "version", "unsupported version of the graph format", came=version, accepted="3.x.y"
        )
    entries = expect(fields.get("graph"), list, "graph")
    facts: _Facts = {}
    steps: list[Step] = []
    left_out: list[str] = []
    read_by_others: dict[str, None] = {}
    for i, entry in enumerate(entries):
        at = f"graph[{i}]"
        described = expect(entry, dict, at)
        name = expect(described.get("kind"), str, f"{at}.kind")
        kind = OLDER_NAMES.get(name, name)
        if kind in KINDS:
            steps.append(_parse_operator(described, kind, at, facts))
        elif only_known:
            left_out.append(kind)
            read_by_others |= dict.fromkeys(_ids_read(described, at))
        else:
            raise ArgumentValueError(
                f"{at}.kind",
                "unknown operator",
                came=repr(name),
                accepted=", ".join((*KINDS, *OLDER_NAMES)),
                hint="--only-known (in Python: only_known=True) leaves it out",
            )
    if not steps:
        came = ", ".join(dict.fromkeys(left_out)) or None
        raise ArgumentValueError(
            "graph", "has no known operator", came=came, accepted=", ".join(KINDS)
        )
    places: dict[int | None, int] = {}
    for i, step in enumerate(steps):
        if places.setdefault(step.id, i) != i:
            raise ArgumentValueError(f"graph[{i}].id", "two operators have this id", came=step.id)
    ordered = topological_order(steps)
    results = _results(fields, ordered, read_by_others if left_out else None)
    tensors = _tensors(facts, ordered)
    keys = {id_: tensor.key for id_, tensor in tensors.items()}
    declared = {tensor.key: tensor for tensor in tensors.values()}
    named = [
        replace(
            step,
            inputs={port: keys[id_] for port, id_ in step.inputs.items()},
            outputs={port: keys[id_] for port, id_ in step.outputs.items()},
        )
        for step in ordered
    ]
    return Program(
        tuple(checked(step, declared) for step in named),
        declared,
        {keys[id_]: keys[id_] for id_ in results},
        (*_note_on_left_out(left_out), *_notes_on_gradients(named)),
    )


def _parse_operator(fields: dict[str, object], kind: str, where: str, facts: _Facts) -> Step:
    """Return the step of an operator, with ids of tensors in place of their keys."""
    label = expect(fields.get("name", kind), str, f"{where}.name")
    ports = {
        key: _ports(
            getattr(KINDS[kind], key),
            [*_parse_tensors(fields, key, where, facts)],
            f"{label} ({kind}) {key}",
        )
        for key in ("inputs", "outputs")
    }
    return Step(
        DIALECT,
        kind,
        label,
        _parse_attributes(fields.get("attrs", {}), f"{where}.attrs"),
        ports["inputs"],
        ports["outputs"],
        expect(fields.get("id"), int, f"{where}.id"),
    )


def _parse_tensors(fields: dict[str, object], key: str, where: str, facts: _Facts) -> Iterator[str]:
    """Yield the ids of an operator's inputs or outputs, and add what is known of them."""
    for i, entry in enumerate(expect(fields.get(key), list, f"{where}.{key}")):
        at = f"{where}.{key}[{i}]"
        id_, found = parse_logical_tensor(entry, at, is_output=key == "outputs")
        known = facts.setdefault(str(id_), found)
        for fact, value in found.items():
            if known[fact] is None:
                known[fact] = value
            elif value is not None and value != known[fact]:
                raise ArgumentValueError(
                    f"{at}.{fact}",
                    f"differs from an earlier mention of logical tensor {id_}",
                    came=value,
                    accepted=known[fact],
                )
        yield str(id_)


def _ports(ports: Sequence[Port], ids: Sequence[str], where: str) -> dict[str, str]:
    """Return a mapping from port names to tensor ids: each port gets the id at its own index."""
    required = sum(port.required for port in ports)
    if not required <= len(ids) <= len(ports):
        names = ", ".join(port.name if port.required else f"[{port.name}]" for port in ports)
        raise ArgumentValueError(where, "wrong number of tensors", came=len(ids), accepted=names)
    return {port.name: id_ for port, id_ in zip(ports, ids, strict=False)}


def _parse_attributes(value: object, where: str) -> dict[str, object]:
    """Return the value of each name in a JSON object ``{name: {"type": ..., "value": ...}}``.

    Each value is checked against its declared type. Whether the operator accepts the names and
    values is checked later.
    """
    attributes = {}
    for name, entry in expect(value, dict, where).items():
        at = f"{where}.{name}"
        fields = expect(entry, dict, at)
        type_ = expect(fields.get("type"), str, f"{at}.type")
        if type_ not in ATTRIBUTE_TYPES:
            raise ArgumentValueError(
                f"{at}.type",
                "unknown attribute type",
                came=repr(type_),
                accepted=", ".join(ATTRIBUTE_TYPES),
            )
        attributes[name] = fields.get("value")
        if not is_of_type(attributes[name], type_):
            raise ArgumentTypeError(
                f"{at}.value", "is not of the declared type", accepted=f"a value of type {type_}"
            )
    return attributes


def _ids_read(fields: dict[str, object], where: str) -> Iterator[str]:
    """Yield the ids of the tensors that an operator of an unknown kind reads."""
    for i, entry in enumerate(expect(fields.get("inputs", []), list, f"{where}.inputs")):
        at = f"{where}.inputs[{i}]"
        yield str(expect(expect(entry, dict, at).get("id"), int, f"{at}.id"))


def _results(
    fields: dict[str, object], steps: Sequence[Step], read_by_others: Collection[str] | None
) -> list[str]:
    """Return the declared outputs; if none are declared, all results that no operator consumes.

    If operators were left out, `read_by_others` are the tensors that they read. These tensors are
    outputs, too, and the outputs of the operators that were left out are not.
    """
    produced = dict.fromkeys(id_ for step in steps for id_ in step.outputs.values())
    declared = expect(fields.get("output_ports", []), list, "output_ports")
    others = read_by_others or ()
    if not declared:
        consumed = {id_ for step in steps for id_ in step.inputs.values()}
        return [id_ for id_ in produced if id_ not in consumed or id_ in others]
    outputs = []
    for i, entry in enumerate(declared):
        outputs.append(str(expect(entry, int, f"output_ports[{i}]")))
        if outputs[-1] not in produced and read_by_others is None:
            raise ArgumentValueError(
                f"output_ports[{i}]", "no operator produces this logical tensor", came=entry
            )
    return [id_ for id_ in dict.fromkeys([*outputs, *others]) if id_ in produced]


def _tensors(facts: _Facts, steps: Sequence[Step]) -> dict[str, Tensor]:
    """Return the tensors by id. A name that two tensors have is left out of their aliases."""
    keys = {id_: found["name"] or id_ for id_, found in facts.items()}
    twice = next((key for key, count in Counter(keys.values()).items() if count > 1), None)
    if twice is not None:
        raise ArgumentValueError("graph", f"two logical tensors have the name {twice!r}")
    names: dict[str, dict[str, None]] = {id_: {keys[id_]: None, id_: None} for id_ in keys}
    for step in steps:
        for port, id_ in (*step.inputs.items(), *step.outputs.items()):
            names[id_] |= {f"{step.label}.{port}": None, port: None}
    uses = Counter(name for own in names.values() for name in own)
    primary = set(keys.values())
    return {
        id_: Tensor(
            keys[id_],
            (keys[id_], *(n for n in names[id_] if n not in primary and uses[n] == 1)),
            found["shape"],
            found["dtype"],
            found["stride"],
            int(id_),
        )
        for id_, found in facts.items()
    }


def _note_on_left_out(kinds: Sequence[str]) -> Iterator[str]:
    """Yield a note that counts the operators that were left out, if any."""
    if kinds:
        counts = ", ".join(f"{kind} ({number})" for kind, number in Counter(kinds).items())
        yield f"left out {counted(len(kinds), 'operator')}: {counts}"


def _notes_on_gradients(steps: Sequence[Step]) -> Iterator[str]:
    """Yield a remark on each ReLUBackward that feeds the `src` of a backward pass."""
    producers = {key: step for step in steps for key in step.outputs.values()}
    for step in steps:
        producer = producers.get(step.inputs["src"])
        if (
            step.op == "BatchNormTrainingBackward"
            and producer is not None
            and producer.op == "ReLUBackward"
        ):
            yield (
                f"{producer.label} (ReLUBackward) feeds src of {step.label}, as in oneDNN's own "
                "pattern: this is not the gradient of normalisation followed by ReLU, where it "
                "feeds diff_dst"
            )
