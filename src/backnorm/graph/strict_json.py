"""Read JSON files: an error names the file, or the place in the file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TypeVar

from backnorm.errors import ArgumentTypeError, ArgumentValueError

Json = TypeVar("Json", dict[str, object], list[object], str, int)

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "an integer"}


def read_json(path: Path) -> object:
    """Return the value of a JSON file.

    Apart from bad syntax, these are errors: a key that occurs twice in an object, nesting beyond
    Python's recursion limit, and integers with more digits than Python converts. NaN and infinite
    numbers are read, as Python's `json` does; operators refuse them.
    """
    text = path.read_bytes()
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ArgumentValueError(str(path), f"is not acceptable JSON: {error}") from error


def expect(value: object, kind: type[Json], where: str) -> Json:
    """Return `value`, which is at the place `where`, or raise if its JSON type is another one."""
    if type(value) is kind:
        return value
    came = "null" if value is None else _KINDS.get(type(value), "")
    if isinstance(value, int | float) and not isinstance(value, bool):
        came = f"the number {value}"
    raise ArgumentTypeError(where, "has the wrong JSON type", came=came, accepted=_KINDS[kind])


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return result
