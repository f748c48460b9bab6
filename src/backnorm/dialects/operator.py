"""The base class of the dialects' operators.

Each operator is a class with a table of rules (`rules`), a method ``__call__`` with the parameters
and the documentation of the specification, and methods for behaviour that rules cannot express.
``__call__`` passes its arguments to `Operator._run`. The first call is checked against the rules
(`_check`), translated to a call of backnorm's own operation (the canonical call, `_call`), bound to
an executable (`_run`) and cached. A later call of plain arrays with the same types, shapes and
attributes finds the bound call in the cache, and runs it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from backnorm.arithmetics import Arithmetic, resolved
from backnorm.arrays import NUMPY
from backnorm.dialects._attributes import check_attributes
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import check_inputs, check_outputs
from backnorm.dialects._description import described
from backnorm.dialects._operator import operator as operator
from backnorm.dialects._run import Arrays, BoundCall, bound
from backnorm.dialects._statistics import native
from backnorm.dialects.schema import OperatorSchema
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown
from backnorm.executable import CALLS, NO_FACTS, settings
from backnorm.scalars import check_word
from backnorm.signature import SIGNATURES

__all__ = ["Operator", "Outputs", "by_name", "operator"]

#: Requested outputs: a number n (the first n), names, or None (all).
Outputs = int | Collection[str] | None


class Operator:
    """An operator of a dialect.

    Attributes
    ----------
    rules : tuple of OperatorSchema
        The table of each revision; the first is the default.
    schema : OperatorSchema
        The schema of the instance's revision; in the class, that of the first revision.
    schemas : mapping of str to OperatorSchema
        The schemas by revision; the key is "" if there is only one.
    attributes : mapping
        The checked attributes of an operator that was configured.
    """

    rules: ClassVar[tuple[OperatorSchema, ...]] = ()
    schemas: ClassVar[Mapping[str, OperatorSchema]]
    schema: OperatorSchema
    attributes: Mapping[str, object] = MappingProxyType({})
    # The keys of the operator's calls in the call cache begin with this tuple.
    _identity: tuple[Hashable, ...]

    def __init_subclass__(cls) -> None:
        if not cls.rules:
            # A class without rules is only a base class of operators.
            return
        schemas = [described(rules, cls) for rules in cls.rules]
        cls.schemas = MappingProxyType({schema.revision or "": schema for schema in schemas})
        cls.schema = schemas[0]
        cls._identity = (cls.schema.dialect, cls.schema.op)

    @classmethod
    def schema_for(cls, attributes: Mapping[str, object]) -> OperatorSchema:
        """Return the schema that a call with these attributes follows."""
        schema = next(iter(cls.schemas.values()))
        if schema.revision is None:
            return schema
        return cls.schemas[_revision(attributes.get("revision", schema.revision), cls)]

    @classmethod
    def frozen_schema(cls, schema: OperatorSchema) -> OperatorSchema:
        """Return the schema that calls with constant statistics follow, in the same revision.

        If the operator has no attribute for constant statistics, the result is `schema` itself.
        """
        flags = {
            spec.name: spec.role == "frozen"
            for spec in schema.attributes
            if spec.role in ("training", "frozen")
        }
        return cls.schema_for({**flags, "revision": schema.revision}) if flags else schema

    @classmethod
    def translate(cls, call: Call) -> CanonicalCall:
        """Return the call of backnorm's own operation (the canonical call) for a checked call.

        The result depends only on shapes, types and attributes, so a repeated call is not
        translated again.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the call breaks a rule that no table can express.
        """
        return canonical_call(call)

    @classmethod
    def finish(
        cls, call: Call, arrays: Arrays, results: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Complete the results of the canonical call, and return all results by role.

        This method is called if the operator has outputs that backnorm's operation does not have,
        if the canonical call is `blended` (see `CanonicalCall`), or if memory for the gradients of
        parameters is given. `call` has the shapes and types of the inputs, `arrays` their values.
        """
        return results

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
        """Call the operator with arguments by the dialect's names; return the requested outputs in
        the dialect's order.

        `out` is memory for the first output. In a backward pass, `out` may be the array dy itself.
        """
        call = cls.bind(inputs, attributes, outputs, arithmetic)
        values = cls._bound(call)(_in_order(call), out)
        return dict(zip(call.outputs, values, strict=True))

    @classmethod
    def canonical(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        *,
        arithmetic: Arithmetic | None = None,
    ) -> CanonicalCall:
        """Check a call and return the canonical call (see `translate`), without running it."""
        canonical = cls.translate(cls.bind(inputs, attributes, outputs, arithmetic))
        results = {result.name for result in SIGNATURES[canonical.operation].results}
        computed = {role: name for role, name in canonical.outputs.items() if role in results}
        return replace(canonical, outputs=computed)

    @classmethod
    def bind(
        cls,
        inputs: Mapping[str, object],
        attributes: Mapping[str, object],
        outputs: Outputs = None,
        arithmetic: Arithmetic | None = None,
    ) -> Call:
        """Return the call, checked against the schema."""
        for name, values in {"inputs": inputs, "attributes": attributes}.items():
            if not issubclass(type(values), Mapping):
                raise ArgumentTypeError(
                    name, "must be a mapping", came=type(values).__name__, accepted="values by name"
                )
        schema = cls.schema_for(attributes)
        checked = check_attributes(schema, attributes)
        arrays = check_inputs(schema, checked, inputs)
        computed_in = resolved(native(arrays[schema.words["x"]]), arithmetic)
        return Call(schema, arrays, checked, check_outputs(schema, outputs), computed_in)

    @classmethod
    def _bound(cls, call: Call) -> BoundCall:
        names = [tensor.name for tensor in call.schema.inputs]
        return bound(call, cls.translate(call), cls.finish, names, call.outputs)

    def _run(
        self,
        inputs: tuple[object, ...],
        attributes: tuple[object, ...] = (),
        *,
        outputs: Any = None,
        memory: object = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return the outputs. `inputs` and `attributes` are in the order in which the rules list
        them.

        Operators of some dialects are configured: they get their attributes before the call, and
        keep them in `self.attributes`. For such an operator, the argument `attributes` is empty.
        """
        key: tuple[object, ...] | None
        options = (*attributes, outputs, arithmetic)
        try:
            key = (
                self._identity,
                options,
                # The key has the classes of the options, because calls with the options True, 1 and
                # 1.0 would otherwise have equal keys.
                *map(type, options),
                *NUMPY.facts(inputs),
                settings(),
            )
            repeated: BoundCall | None = CALLS.get(key)
        except NO_FACTS:
            key = repeated = None
        except Exception:
            # An exception has two possible sources. If a method of an invalid attribute raised it,
            # `_first` checks the attribute and raises a clearer exception. If a signal handler
            # raised it, `_first` returns, and the same exception is raised again.
            self._first(None, inputs, attributes, outputs, memory, arithmetic)
            raise
        if repeated is None:
            return self._first(key, inputs, attributes, outputs, memory, arithmetic)
        outputs_: tuple[np.ndarray, ...] = repeated(inputs, memory)
        return outputs_

    def _first(
        self,
        key: Hashable | None,
        inputs: tuple[object, ...],
        attributes: tuple[object, ...],
        outputs: Any,
        memory: object,
        arithmetic: Arithmetic | None,
    ) -> tuple[np.ndarray, ...]:
        """Check and run a call; cache the bound call, unless `key` is None."""
        named = dict(zip((tensor.name for tensor in self.schema.inputs), inputs, strict=True))
        values = self.attributes or dict(
            zip((spec.name for spec in self.schema.attributes), attributes, strict=True)
        )
        call = self.bind(named, values, outputs, arithmetic)
        found = self._bound(call)
        results: tuple[np.ndarray, ...] = found(_in_order(call), memory)
        if key is not None and all(type(each) in NUMPY.classes for each in inputs):
            CALLS.keep(key, found)
        return results

    def _configure(self, attributes: Mapping[str, object]) -> None:
        """Set the attributes of an operator that is configured before it is called."""
        self.schema = self.schema_for(attributes)
        self.attributes = MappingProxyType(check_attributes(self.schema, attributes))
        values = self.attributes.values()
        self._identity = (*self._identity, *values, *map(type, values))

    def __repr__(self) -> str:
        name = f"backnorm.dialects.{self.schema.dialect}.{self.schema.op}"
        values = ", ".join(f"{key}={value!r}" for key, value in self.attributes.items())
        return f"{name}({values})" if self.attributes else name

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.schema.style == "configured":
            return partial(type(self), **self.attributes), ()
        # Pickle stores only this name. To load the operator again, it looks up the name in the
        # operator's module.
        return self.schema.op


def by_name(*operators: Any) -> dict[str, Operator | type[Operator]]:
    """Return a mapping from names in the dialect to operators; raise if two names are equal."""
    found = {operator.schema.op: operator for operator in operators}
    if len(found) < len(operators):
        names = [operator.schema.op for operator in operators]
        raise ValueError(f"the operators must have different names; got {', '.join(names)}")
    return found


def _in_order(call: Call) -> tuple[np.ndarray | None, ...]:
    """Return the inputs of a call in the order of its schema, None for those that are absent."""
    return tuple(call.inputs.get(tensor.name) for tensor in call.schema.inputs)


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
