"""Check attributes against the rules of an operator."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from backnorm.dialects.schema import AttributeSpec, OperatorSchema
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described, shown
from backnorm.scalars import check_flag, check_integer, check_number, check_word


def check_attributes(schema: OperatorSchema, attributes: Mapping[str, object]) -> dict[str, object]:
    """Return all attributes with checked values, including defaults."""
    refuse_unknown(attributes, [a.name for a in schema.attributes], "attribute", schema)
    checked: dict[str, object] = {}
    for spec in schema.attributes:
        if spec.required and spec.name not in attributes:
            raise ArgumentTypeError(
                spec.name, f"is a required attribute of {schema.op}", accepted=accepted_by(spec)
            )
        checked[spec.name] = check_attribute(spec, attributes.get(spec.name, spec.default))
    return checked


def refuse_unknown(
    names: Iterable[str], known: Sequence[str], kind: str, schema: OperatorSchema
) -> None:
    """Raise if a name is not one of the known inputs or attributes (`kind`) of the operator."""
    for name in names:
        if name not in known:
            raise ArgumentTypeError(
                shown(name, str),
                f"{schema.op} has no such {kind}",
                accepted=", ".join(known) or "none",
            )


def check_attribute(spec: AttributeSpec, value: object) -> object:
    """Return the checked value of an attribute, or raise an ArgumentError."""
    if value is None and spec.nullable:
        return None
    if spec.type == "bool":
        return check_flag(spec.name, value)
    if spec.type == "string":
        word = check_word(spec.name, value, accepted=accepted_by(spec))
        if spec.choices and word not in spec.choices:
            raise ArgumentValueError(
                spec.name, "unknown value", came=shown(word), accepted=accepted_by(spec)
            )
        return word
    if spec.type == "axes":
        return _axes(spec, value)
    return _index(spec, value) if spec.type == "i64" else _number(spec, value)


def _axes(spec: AttributeSpec, value: object) -> tuple[int, ...]:
    """Return axes as integers, in ascending order."""
    kind = type(value)
    if issubclass(kind, str | bytes) or not issubclass(kind, Sequence | np.ndarray):
        raise ArgumentTypeError(
            spec.name, "must be a sequence", came=described(value), accepted=accepted_by(spec)
        )
    axes = [
        check_integer(spec.name, axis, accepted=accepted_by(spec))
        for axis in elements(spec.name, value, accepted_by(spec))
    ]
    if any(axis < 0 for axis in axes) or len(set(axes)) < len(axes):
        raise ArgumentValueError(
            spec.name, "must be different axes", came=axes, accepted=accepted_by(spec)
        )
    return tuple(sorted(axes))


def elements(argument: str, collection: Any, accepted: str) -> list[Any]:
    """Return the elements of a collection; if its methods raise, raise ArgumentTypeError."""
    try:
        return list(collection)
    except Exception as error:
        raise ArgumentTypeError(
            argument,
            "must be a collection whose elements can be read",
            came=described(collection),
            accepted=accepted,
        ) from error


def _index(spec: AttributeSpec, value: object) -> int:
    index = check_integer(spec.name, value, accepted=accepted_by(spec))
    if index < 0 and spec.range != "any":
        raise ArgumentValueError(
            spec.name, f"must be {spec.range}", came=index, accepted=accepted_by(spec)
        )
    return index


def _number(spec: AttributeSpec, value: object) -> float:
    number = check_number(spec.name, value, accepted=accepted_by(spec))
    if spec.type == "f32":
        with np.errstate(over="ignore", under="ignore"):
            number = float(np.float32(number))
    in_range = spec.range == "any" or number > 0 or (spec.range == "not negative" and number == 0)
    if not (math.isfinite(number) and in_range):
        raise ArgumentValueError(
            spec.name, f"must be {_range(spec)}", came=shown(value), accepted=accepted_by(spec)
        )
    return number


def _range(spec: AttributeSpec) -> str:
    return "finite" if spec.range == "any" else f"finite and {spec.range}"


def accepted_by(spec: AttributeSpec) -> str:
    """Return a text with the accepted values of an attribute."""
    if spec.type == "bool":
        return "True or False"
    if spec.type == "string":
        return " or ".join(repr(choice) for choice in spec.choices) or "a string"
    if spec.type == "axes":
        return "a sequence of different integers, not negative"
    if spec.type == "i64":
        return "an integer" + ("" if spec.range == "any" else f", {spec.range}")
    return f"a number, {_range(spec)}" + (" as float32" if spec.type == "f32" else "")
