"""The checks of attributes, which a schema drives."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real

import numpy as np

from backnorm.dialects.schema import REQUIRED, AttributeSpec, OperatorSchema
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import check_flag

__all__ = ["accepted_by", "check_attributes", "refuse_unknown"]


def check_attributes(schema: OperatorSchema, given: Mapping[str, object]) -> dict[str, object]:
    """Return every attribute with its checked value, defaults filled in."""
    refuse_unknown(given, [a.name for a in schema.attributes], "attribute", schema)
    return {
        spec.name: _attribute(spec, given.get(spec.name, spec.default), schema)
        for spec in schema.attributes
    }


def refuse_unknown(
    given: Iterable[str], known: Sequence[str], what: str, schema: OperatorSchema
) -> None:
    """Raise if one of the names `given` is not known to the operator."""
    for name in given:
        if name not in known:
            raise ArgumentTypeError(
                str(name), f"{schema.op} has no such {what}", accepted=", ".join(known) or "none"
            )


def _attribute(spec: AttributeSpec, value: object, schema: OperatorSchema) -> object:
    if value is REQUIRED:
        raise ArgumentTypeError(
            spec.name, f"is a required attribute of {schema.op}", accepted=accepted_by(spec)
        )
    if value is None and spec.nullable:
        return None
    if spec.type == "bool":
        return check_flag(spec.name, value)
    if spec.type == "string":
        if not isinstance(value, str):
            raise ArgumentTypeError(
                spec.name,
                "must be a string",
                came=f"{value!r} of type {type(value).__name__}",
                accepted=accepted_by(spec),
            )
        if spec.choices and value not in spec.choices:
            raise ArgumentValueError(
                spec.name, "unknown value", came=repr(value), accepted=accepted_by(spec)
            )
        return value
    return _index(spec, value) if spec.type == "i64" else _number(spec, value)


def _index(spec: AttributeSpec, value: object) -> int:
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        index = operator.index(value)  # type: ignore[arg-type]
    except TypeError as error:
        raise ArgumentTypeError(
            spec.name,
            "must be an integer",
            came=f"{value!r} of type {type(value).__name__}",
            accepted=accepted_by(spec),
        ) from error
    if index < 0 and spec.range != "any":
        raise ArgumentValueError(
            spec.name, f"must be {spec.range}", came=index, accepted=accepted_by(spec)
        )
    return index


def _number(spec: AttributeSpec, value: object) -> float:
    is_number = isinstance(value, Real | np.floating | np.integer)
    if not is_number or isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(
            spec.name,
            "must be a real number",
            came=f"{value!r} of type {type(value).__name__}",
            accepted=accepted_by(spec),
        )
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if spec.type == "f32":
        with np.errstate(over="ignore"):
            number = float(np.float32(number))
    in_range = spec.range == "any" or number > 0 or (spec.range == "not negative" and number == 0)
    if not (math.isfinite(number) and in_range):
        raise ArgumentValueError(
            spec.name, f"must be {_range(spec)}", came=value, accepted=accepted_by(spec)
        )
    return number


def _range(spec: AttributeSpec) -> str:
    return "finite" if spec.range == "any" else f"finite and {spec.range}"


def accepted_by(spec: AttributeSpec) -> str:
    """Return what an attribute may be, in words."""
    if spec.type == "bool":
        return "True or False"
    if spec.type == "string":
        return " or ".join(repr(choice) for choice in spec.choices) or "a string"
    if spec.type == "i64":
        return "an integer" + ("" if spec.range == "any" else f", {spec.range}")
    return f"a number, {_range(spec)}" + (" as float32" if spec.type == "f32" else "")
