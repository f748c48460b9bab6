"""An operator of a dialect, made from its schema: the callable, its checks, its repeated calls.

A first call is checked against the schema (`_check`), bound to the canonical operation that it is
(`_call`, `_run`) and kept; a repeated call, of plain arrays with the same metadata, finds that by a
key and runs it.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Collection, Hashable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from backnorm.arithmetics import Arithmetic, resolved
from backnorm.arrays import NUMPY
from backnorm.dialects._attributes import check_attributes, refuse_unknown
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import check_inputs, check_outputs, wanted
from backnorm.dialects._documentation import documentation_of_call, documentation_of_configuration
from backnorm.dialects._run import Bound
from backnorm.dialects._source import function_of, function_of_revisions, initializer_of
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, shown
from backnorm.executable import CALLS
from backnorm.scalars import check_word

__all__ = ["Operator", "Outputs", "by_name", "configured", "function"]

#: How outputs are requested: that many from the first, by name, or (None) all.
Outputs = int | Collection[str] | None


class Operator:
    """An operator of a dialect; `function` and `configured` make its class from schemas.

    Attributes
    ----------
    schema : OperatorSchema
        Of a class: the first revision's; of an instance: its own revision's.
    schemas : mapping of str to OperatorSchema
        By revision; "" where there is but one.
    attributes : mapping
        Of an operator that was configured: the checked attributes.
    identity : tuple
        What the keys of its calls begin with.
    pack : callable or None
        From a tuple of the outputs to what a call returns; None: the only one.
    """

    schema: OperatorSchema
    schemas: ClassVar[Mapping[str, OperatorSchema]]
    attributes: Mapping[str, object] = MappingProxyType({})
    identity: tuple[Hashable, ...]
    pack: Callable[[Any], Any] | None = tuple

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema that a call with these attributes follows."""
        schema = next(iter(cls.schemas.values()))
        if schema.revision is not None:
            schema = cls.schemas[_revision(attributes.get("revision", schema.revision), cls)]
        variant = schema.hooks.variant
        return schema if variant is None else variant(attributes)

    @classmethod
    def invoke(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        out: Any = None,
        arithmetic: Arithmetic | None = None,
    ) -> dict[str, np.ndarray]:
        """Call by the dialect's names; return the requested outputs in index order.

        `out` is an array for the first output; it may be the gradient that comes in.
        """
        call = cls.bind(inputs, attributes, outputs, arithmetic)

        def named(values: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
            return dict(zip(call.outputs, values, strict=True))

        results: dict[str, np.ndarray] = _run(Bound.of(call).code(call.outputs, named), call, out)
        return results

    @classmethod
    def canonical(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> CanonicalCall:
        """Check the call and return which canonical call it is, without running it."""
        return canonical_call(cls.bind(inputs, attributes, outputs, arithmetic))

    @classmethod
    def bind(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        arithmetic: Arithmetic | None = None,
    ) -> Call:
        """Check a call against the schema."""
        for name, given in {"inputs": inputs, "attributes": attributes}.items():
            if not issubclass(type(given), Mapping):
                raise ArgumentTypeError(
                    name, "must be a mapping", came=type(given).__name__, accepted="values by name"
                )
        schema = cls.schema_for(attributes)
        checked = check_attributes(schema, attributes)
        arrays = check_inputs(schema, checked, inputs)
        dtype = element_type(arrays[schema.words["x"]].dtype)
        assert dtype is not None
        how = resolved(dtype, arithmetic)
        call = Call(schema, arrays, checked, check_outputs(schema, outputs), how)
        if schema.hooks.check is not None:
            schema.hooks.check(call)
        return call

    def __reduce__(self) -> tuple[Any, ...]:
        if self.schema.style == "configured":
            return type(self)._configured, (dict(self.attributes),)
        return _found, (self.schema.dialect, self.schema.op)

    @classmethod
    def _configured(cls, attributes: Mapping[str, object]) -> Operator:
        made = cls.__new__(cls)
        _configure(made, attributes)
        return made


def function(schema: OperatorSchema) -> Any:
    """Return the operator that `schema` describes: a callable of inputs and attributes."""
    members: dict[str, Any] = {"__call__": _method(schema, "__call__")}
    for name, order in schema.other_orders.items():
        members[name] = _method(schema, name, order)
    return _class_of([schema], documentation_of_call(schema), members)()


def configured(*schemas: OperatorSchema) -> Any:
    """Return the operator that the schemas of all its revisions describe: a class.

    Its constructor takes the attributes, and its instances the inputs.
    """
    members: dict[str, Any] = {"__init__": initializer_of(schemas, _configure)}
    if len(schemas) == 1:
        members["__call__"] = _method(schemas[0], "__call__")
    else:
        members["by_revision"] = {
            schema.revision: _method(schema, "__call__") for schema in schemas
        }
        members["__call__"] = function_of_revisions(schemas[0], _refuse_inputs_of_revision)
        members["__call__"].__doc__ = documentation_of_call(schemas[0])
    return _class_of(schemas, documentation_of_configuration(schemas), members)


def by_name(*operators: Any) -> dict[str, Operator | type[Operator]]:
    """Return operators by their names in the dialect."""
    return {operator.schema.op: operator for operator in operators}


@functools.cache
def _returned_type(module: str, name: str, fields: tuple[str, ...]) -> Any:
    """Return the NamedTuple of the outputs of an operator."""
    return collections.namedtuple(name, fields, module=module)


def _class_of(
    schemas: Collection[OperatorSchema], documentation: str, members: dict[str, Any]
) -> type[Operator]:
    first = next(iter(schemas))
    members |= {
        "__module__": f"backnorm.dialects.{first.dialect}",
        "__doc__": documentation,
        "schema": first,
        "identity": _identity(first),
        "schemas": MappingProxyType({schema.revision or "": schema for schema in schemas}),
    }
    if first.result == "array":
        members["pack"] = None
    elif first.result != "tuple":
        fields = tuple(tensor.name for tensor in first.outputs)
        members["returned"] = _returned_type(members["__module__"], first.result, fields)
        members["pack"] = members["returned"]._make
    return type(first.op, (Operator,), members)


def _identity(schema: OperatorSchema) -> tuple[Hashable, ...]:
    return schema.dialect, schema.op, schema.revision


def _method(schema: OperatorSchema, name: str, order: tuple[str, ...] = ()) -> Callable[..., Any]:
    method = function_of(schema, _first, name, order)
    method.__doc__ = documentation_of_call(schema)
    method.__module__ = f"backnorm.dialects.{schema.dialect}"
    method.__qualname__ = f"{schema.op}.{name}"
    return method


def _configure(
    operator: Operator, attributes: Mapping[str, object], own: Collection[str] = ()
) -> None:
    """Set what a configured operator has; of the attributes `own`, None is the revision's own."""
    given = {
        name: value for name, value in attributes.items() if not (value is None and name in own)
    }
    operator.schema = operator.schema_for(given)
    operator.attributes = MappingProxyType(check_attributes(operator.schema, given))
    values = operator.attributes.values()
    operator.identity = (*_identity(operator.schema), *values, *map(type, values))


def _first(
    operator: Operator,
    key: Hashable | None,
    inputs: Mapping[str, object],
    attributes: Mapping[str, object],
    choice: Any,
    memory: Any,
    arithmetic: Arithmetic | None,
) -> Any:
    """Check and run a call; keep it under the key, if there is one, for those like it."""
    # Arrays that kernels cannot read as they are: what is planned depends on how they lie.
    layouts = None if key is None else NUMPY.layouts(tuple(inputs.values()))
    copied = None if layouts is None else (key, layouts)
    found = CALLS.get(copied)
    if found is not None:
        return found(*inputs.values(), memory)
    schema = operator.schema_for(attributes)
    outputs = wanted(schema, choice) if schema.choice == "output_mask" else choice
    call = operator.bind(inputs, attributes, outputs, arithmetic)
    returned: tuple[str | None, ...] = call.outputs
    if schema.choice == "output_mask":
        returned = tuple(t.name if t.name in call.outputs else None for t in schema.outputs)
    bound = Bound.of(call)
    code = bound.code(returned, operator.pack)
    result = _run(code, call, memory)
    if key is not None and bound.is_repeatable:
        CALLS.keep(key, bound.code(returned, operator.pack, plain=True))
    elif copied is not None:
        CALLS.keep(copied, code)
    return result


def _run(code: Callable[..., Any], call: Call, out: Any) -> Any:
    """Return what the code of a call returns for its arrays."""
    return code(*(call.inputs.get(tensor.name) for tensor in call.schema.inputs), out)


def _refuse_inputs_of_revision(
    operator: Operator,
    positional: tuple[object, ...],
    named: Mapping[str, object],
    error: TypeError,
) -> None:
    """Raise the error of a call, or what is wrong with its inputs."""
    try:
        _check_inputs_of_revision(operator, positional, named)
    except ArgumentError as refused:
        raise refused from None
    raise error


def _check_inputs_of_revision(
    operator: Operator, positional: tuple[object, ...], named: Mapping[str, object]
) -> None:
    """Raise if inputs are not those of the operator's revision."""
    schema = operator.schema
    names = [tensor.name for tensor in schema.inputs]
    if len(positional) > len(names):
        raise ArgumentTypeError(
            schema.op,
            "too many inputs",
            came=len(positional),
            accepted=f"{', '.join(names)}, then keywords",
        )
    for name in named:
        if name in names[: len(positional)]:
            raise ArgumentTypeError(name, "given twice", came="by position and by name")
    refuse_unknown(named, names, "input", schema)


def _revision(value: object, operator: type[Operator]) -> str:
    accepted = tuple(operator.schemas)
    word = check_word("revision", value, accepted=" or ".join(accepted))
    if word not in accepted:
        raise ArgumentValueError(
            "revision",
            f"unknown revision of {operator.schema.op}-1",
            came=shown(word),
            accepted=" or ".join(map(repr, accepted)),
        )
    return word


def _found(dialect: str, op: str) -> Any:
    from backnorm.dialects.registry import operator

    return operator(dialect, op)
