"""The base class of the dialects' operators.

A class of its own describes each operator: a table of rules (`rules`), a method ``__call__`` with
the parameters and the documentation of the specification, and methods for what the rules do not
say. ``__call__`` passes its arguments to `Operator._run`. A first call is checked against the rules
(`_check`), translated to the canonical call that it is (`_call`), bound to an executable (`_run`)
and cached; a repeated call, of plain arrays with the same metadata, finds that by a key and runs
it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from backnorm.arithmetics import Arithmetic, chosen, resolved
from backnorm.arrays import NUMPY
from backnorm.binding import NO_FACTS
from backnorm.dialects._attributes import check_attributes
from backnorm.dialects._call import Call, CanonicalCall, canonical_call
from backnorm.dialects._check import check_inputs, check_outputs
from backnorm.dialects._description import described
from backnorm.dialects._run import Arrays, BoundCall, bound
from backnorm.dialects.schema import OperatorSchema
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError, shown
from backnorm.executable import CALLS
from backnorm.scalars import check_word
from backnorm.signature import SIGNATURES
from backnorm.threads import get_num_threads

__all__ = ["Operator", "Outputs", "by_name"]

#: Requested outputs: a number from the first, names, or (None) all.
Outputs = int | Collection[str] | None


class Operator:
    """An operator of a dialect.

    Attributes
    ----------
    rules : tuple of OperatorSchema
        The table of each revision, the first being the usual one.
    schema : OperatorSchema
        Of a class: the first revision's; of an instance: its own revision's.
    schemas : mapping of str to OperatorSchema
        By revision; "" where there is but one.
    attributes : mapping
        Of an operator that was configured: the checked attributes.
    """

    rules: ClassVar[tuple[OperatorSchema, ...]] = ()
    schemas: ClassVar[Mapping[str, OperatorSchema]]
    schema: OperatorSchema
    attributes: Mapping[str, object] = MappingProxyType({})
    # The first part of the keys of its calls.
    _identity: tuple[Hashable, ...]

    def __init_subclass__(cls) -> None:
        if not cls.rules:
            # What several operators share.
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
    def translate(cls, call: Call) -> CanonicalCall:
        """Return the canonical call that a checked call is.

        It depends on shapes, types and attributes alone: a repeated call is not translated again.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            If the call breaks a rule that is in no table.
        """
        return canonical_call(call)

    @classmethod
    def finish(
        cls, call: Call, arrays: Arrays, results: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Return all results by role, from those of the canonical operation.

        Called if the canonical operation has not all outputs, or there is memory for the gradients
        of parameters. `call` has the shapes and types of its inputs, `arrays` their values.
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
        """Call by the dialect's names; return the requested outputs in index order.

        `out` is an array for the first output; it may be the gradient of the output.
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
        """Check the call and return the canonical call that it is, without running it."""
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
        """Check a call against the schema."""
        for name, values in {"inputs": inputs, "attributes": attributes}.items():
            if not issubclass(type(values), Mapping):
                raise ArgumentTypeError(
                    name, "must be a mapping", came=type(values).__name__, accepted="values by name"
                )
        schema = cls.schema_for(attributes)
        checked = check_attributes(schema, attributes)
        arrays = check_inputs(schema, checked, inputs)
        dtype = element_type(arrays[schema.words["x"]].dtype)
        assert dtype is not None
        computed_in = resolved(dtype, arithmetic)
        return Call(schema, arrays, checked, check_outputs(schema, outputs), computed_in)

    @classmethod
    def _bound(cls, call: Call) -> BoundCall:
        return bound(call, cls.translate(call), cls.finish)

    def _run(
        self,
        inputs: tuple[object, ...],
        attributes: tuple[object, ...] = (),
        *,
        outputs: Any = None,
        memory: object = None,
        arithmetic: Arithmetic | None = None,
    ) -> tuple[np.ndarray, ...]:
        """Return the outputs for inputs and attributes in the order of the rules.

        An operator that was configured has its own attributes.
        """
        key: tuple[object, ...] | None
        try:
            key = (
                self._identity,
                *[
                    None if a is None else (type(a), a.shape, a.dtype, a.flags.num)  # type: ignore[attr-defined]
                    for a in inputs
                ],
                # True == 1 == 1.0: a key cannot tell them apart without their classes.
                *attributes,
                *map(type, attributes),
                type(outputs),
                outputs,
                type(arithmetic),
                arithmetic,
                get_num_threads(),
                chosen(),
            )
            repeated: BoundCall | None = CALLS.get(key)
        except NO_FACTS:
            key = repeated = None
        except Exception:
            # Either an attribute's own method raised it, and it is refused, or a signal handler.
            self._first(None, inputs, attributes, outputs, memory, arithmetic)
            raise
        if repeated is None:
            return self._first(key, inputs, attributes, outputs, memory, arithmetic)
        return repeated(inputs, memory)

    def _first(
        self,
        key: Hashable | None,
        inputs: tuple[object, ...],
        attributes: tuple[object, ...],
        outputs: Any,
        memory: object,
        arithmetic: Arithmetic | None,
    ) -> tuple[np.ndarray, ...]:
        """Check and run a call; cache it under the key, if there is one."""
        # Kernels cannot read these arrays in place: the plan also depends on their layouts.
        layouts = None if key is None else NUMPY.layouts(inputs)
        copied = None if layouts is None else (key, layouts)
        repeated: BoundCall | None = CALLS.get(copied)
        if repeated is not None:
            return repeated(inputs, memory)
        named = dict(zip((tensor.name for tensor in self.schema.inputs), inputs, strict=True))
        values = self.attributes or dict(
            zip((spec.name for spec in self.schema.attributes), attributes, strict=True)
        )
        call = self.bind(named, values, outputs, arithmetic)
        found = self._bound(call)
        results = found(_in_order(call), memory)
        if key is not None and found.is_plain:
            CALLS.keep(key, found)
        elif copied is not None:
            CALLS.keep(copied, found)
        return results

    def _configure(self, attributes: Mapping[str, object]) -> None:
        """Set the attributes of an operator that is configured before it is called."""
        self.schema = self.schema_for(attributes)
        self.attributes = MappingProxyType(check_attributes(self.schema, attributes))
        values = self.attributes.values()
        self._identity = (*self._identity, *values, *map(type, values))

    def __reduce__(self) -> str | tuple[Any, ...]:
        if self.schema.style == "configured":
            return partial(type(self), **self.attributes), ()
        # The name of the instance in its module.
        return self.schema.op


def by_name(*operators: Any) -> dict[str, Operator | type[Operator]]:
    """Return operators by their names in the dialect."""
    return {operator.schema.op: operator for operator in operators}


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
