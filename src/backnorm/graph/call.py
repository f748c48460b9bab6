"""Parse a JSON "call": one operator of any dialect, with named tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from backnorm.dialects import registry
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import ELEMENT_TYPES
from backnorm.errors import ArgumentValueError
from backnorm.graph.logical_tensor import parse_shape, parse_type
from backnorm.graph.program import Program, Step, Tensor, check_name
from backnorm.graph.strict_json import expect

_KEYS = ("dialect", "op", "attributes", "inputs", "outputs", "shapes", "types")
_TYPES = {str(dtype): dtype for dtype in ELEMENT_TYPES}


def parse_call(document: Mapping[str, object]) -> Program:
    """Return the program whose only step is the operator that a JSON call describes.

    Parameters
    ----------
    document : mapping
        ``dialect``, ``op`` : the operator.
        ``attributes`` : object, by the dialect's names (optional).
        ``inputs`` : object, the operator's input -> the tensor's name in the file. The default for
        a required input is its own name; an optional input that is not listed is not passed.
        ``outputs`` : the outputs to write. An object maps the operator's output to its name in the
        file. A list contains outputs that keep their names. The default is all outputs.
        Optional outputs that are not listed are not requested from the operator.
        ``shapes``, ``types`` : objects, the operator's input -> list of integers, or name of an
        element type. Tensors from a file must match them, and random tensors are made with them.

    Raises
    ------
    ArgumentError
        If the document is invalid. The error names the place in the document.
    """
    _refuse_unknown(document, _KEYS, "call")
    dialect = expect(document.get("dialect"), str, "dialect")
    op = expect(document.get("op"), str, "op")
    attributes = expect(document.get("attributes", {}), dict, "attributes")
    schema = registry.operator(dialect, op).schema_for(attributes)
    inputs = _input_names(document.get("inputs", {}), schema)
    written = _output_names(document.get("outputs"), schema, inputs)
    requested = [t.name for t in schema.outputs if t.required or t.name in written]
    # The keys of inputs are names from the document; `check_name` has checked that they are
    # printable. The keys made here contain a line break, so they differ from the keys of all
    # inputs.
    outputs = {port: f"output\n{port}" for port in requested}
    absent = [t.name for t in schema.inputs if t.name not in inputs]
    tensors = _declared(inputs, absent, document)
    tensors |= {key: Tensor(key, (key,)) for key in outputs.values()}
    step = Step(dialect, op, op, attributes, inputs, outputs)
    return Program((step,), tensors, {name: outputs[port] for port, name in written.items()})


def _input_names(value: object, schema: OperatorSchema) -> dict[str, str]:
    """Return a mapping from each input to its name in the file, in the operator's order."""
    listed = expect(value, dict, "inputs")
    _refuse_unknown(listed, [t.name for t in schema.inputs], "inputs")
    return {
        t.name: check_name(listed.get(t.name, t.name), f"inputs.{t.name}")
        for t in schema.inputs
        if t.name in listed or t.required
    }


def _output_names(value: object, schema: OperatorSchema, inputs: Collection[str]) -> dict[str, str]:
    """Return a mapping from each output to its name in the file, in the operator's order."""
    known = [t.name for t in schema.outputs_with(inputs)]
    if value is None:
        return {name: name for name in known}
    if isinstance(value, list):
        ports = [expect(entry, str, f"outputs[{i}]") for i, entry in enumerate(value)]
        listed: Mapping[str, object] = {port: port for port in ports}
    else:
        listed = expect(value, dict, "outputs")
    _refuse_unknown(listed, known, "outputs")
    names = {port: check_name(listed[port], f"outputs.{port}") for port in known if port in listed}
    if len(set(names.values())) != len(names):
        raise ArgumentValueError(
            "outputs", "must have a different name for each output", came=[*names.values()]
        )
    return names


def _declared(
    inputs: Mapping[str, str], absent: Collection[str], document: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return the input tensors with the shapes and types that the document declares."""
    shapes = expect(document.get("shapes", {}), dict, "shapes")
    types = expect(document.get("types", {}), dict, "types")
    for where, listed in (("shapes", shapes), ("types", types)):
        for port in (port for port in listed if port in absent):
            raise ArgumentValueError(
                f"{where}.{port}",
                "must be absent, because the call does not pass this optional input",
                hint=f'to pass {port}, add "{port}": NAME to inputs',
            )
        _refuse_unknown(listed, inputs, where)
    tensors: dict[str, Tensor] = {}
    for port, key in inputs.items():
        # Two inputs may name the same tensor. If both declare its shape or type, the later
        # declaration replaces the earlier one.
        earlier = tensors.get(key, Tensor(key, (key,)))
        shape = parse_shape(shapes[port], f"shapes.{port}") if port in shapes else earlier.shape
        dtype = parse_type(types[port], f"types.{port}", _TYPES) if port in types else earlier.dtype
        tensors[key] = Tensor(key, (key,), shape, dtype)
    return tensors


def _refuse_unknown(keys: Iterable[str], known: Collection[str], where: str) -> None:
    for key in keys:
        if key not in known:
            raise ArgumentValueError(
                where, "unknown key", came=repr(key), accepted=", ".join(known)
            )
