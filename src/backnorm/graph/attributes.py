"""Parse the typed attributes of oneDNN Graph JSON."""

from __future__ import annotations

from collections.abc import Callable

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.graph.strict_json import expect_key, expect_object, expect_string


def parse_attributes(value: object, where: str) -> dict[str, object]:
    """Return the value of each name in a JSON object ``{name: {"type": ..., "value": ...}}``.

    Each value is checked against its declared type. Whether the operator accepts the names and
    values is checked later, by the operator.
    """
    attributes = {}
    for name, entry in expect_object(value, where).items():
        at = f"{where}.{name}"
        fields = expect_object(entry, at)
        declared = expect_string(fields.get("type"), f"{at}.type")
        if declared not in _IS_OF_TYPE:
            raise ArgumentValueError(
                f"{at}.type", "unknown attribute type", came=repr(declared), accepted=_ACCEPTED
            )
        attributes[name] = expect_key(fields, "value", at)
        if not _IS_OF_TYPE[declared](attributes[name]):
            raise ArgumentTypeError(
                f"{at}.value", "is not of the declared type", accepted=f"a value of type {declared}"
            )
    return attributes


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(check(entry) for entry in value)


_IS_OF_TYPE: dict[str, Callable[[object], bool]] = {
    "f32": _is_number,
    "f32[]": _is_list_of(_is_number),
    "s64": _is_integer,
    "s64[]": _is_list_of(_is_integer),
    # oneDNN writes booleans as 0 and 1.
    "bool": lambda value: isinstance(value, bool) or value in (0, 1),
    "string": lambda value: isinstance(value, str),
}
_ACCEPTED = ", ".join(_IS_OF_TYPE)
