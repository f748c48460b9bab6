"""Read JSON from untrusted files: limited size, strict syntax, errors that name the place."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

from backnorm.errors import ArgumentTypeError, ArgumentValueError

#: The size of the largest accepted file, in bytes. Files that describe operators are much smaller.
MAX_BYTES = 16 * 2**20

_LONGEST_NAME = 200
# A .safetensors file keeps its metadata under this key, so no tensor may have this name.
_RESERVED_NAMES = ("__metadata__",)


def read_json(path: Path) -> object:
    """Return the JSON document in a file of at most `MAX_BYTES`.

    The resulting Python objects take up to 44 times as many bytes as the file has.
    """
    with path.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ArgumentValueError(
            str(path), "the file is too large for JSON", accepted=f"at most {MAX_BYTES} bytes"
        )
    return parse_json(data, str(path))


def parse_json(data: bytes, where: str) -> object:
    """Return the value of the UTF-8 JSON text `data`.

    Apart from bad syntax, these are errors: a byte order mark, duplicate keys, NaN, infinities and
    numbers that overflow to infinity, and nesting beyond Python's recursion limit.
    """
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except UnicodeDecodeError as error:
        raise ArgumentValueError(where, f"is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ArgumentValueError(
            where, f"is not JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except RecursionError as error:
        raise ArgumentValueError(where, "is nested too deeply") from error
    except ValueError as error:
        raise ArgumentValueError(where, f"is not acceptable JSON: {error}") from error


def expect_object(value: object, where: str) -> dict[str, object]:
    """Return `value` if it is a JSON object; raise an error if it is anything else."""
    if isinstance(value, dict):
        return value
    raise _wrong(value, where, "an object")


def expect_key(fields: dict[str, object], key: str, where: str) -> object:
    """Return the value of a key that the object at `where` must have."""
    if key not in fields:
        raise ArgumentValueError(where, f"lacks the key {key!r}")
    return fields[key]


def expect_choice(
    fields: dict[str, object], key: str, accepted: tuple[str, ...], where: str
) -> str:
    """Return the value of `key`, or `accepted[0]` if there is no such key.

    Raise an error if the value is not one of `accepted`.
    """
    value = expect_string(fields.get(key, accepted[0]), f"{where}.{key}")
    if value not in accepted:
        raise ArgumentValueError(
            f"{where}.{key}", "is not supported", came=repr(value), accepted=", ".join(accepted)
        )
    return value


def expect_list(value: object, where: str, *, most: int = 1_000_000) -> list[object]:
    """Return `value` if it is a list of at most `most` entries."""
    if not isinstance(value, list):
        raise _wrong(value, where, "a list")
    if len(value) > most:
        raise ArgumentValueError(
            where, "has too many entries", came=len(value), accepted=f"at most {most}"
        )
    return value


def expect_string(value: object, where: str) -> str:
    """Return `value`, or raise if it is not a string."""
    if isinstance(value, str):
        return value
    raise _wrong(value, where, "a string")


def expect_name(value: object, where: str) -> str:
    """Return `value` if it can name a tensor: short, printable, not reserved in tensor files."""
    name = expect_string(value, where)
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable()) or name in _RESERVED_NAMES:
        raise ArgumentValueError(
            where,
            "cannot name a tensor",
            came=repr(name[:_LONGEST_NAME]),
            accepted=f"1 to {_LONGEST_NAME} printable characters",
        )
    return name


def expect_integer(value: object, where: str, *, high: int) -> int:
    """Return `value` if it is an integer from 0 to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(value, where, "an integer")
    if not 0 <= value <= high:
        raise ArgumentValueError(where, "is out of range", came=value, accepted=f"0 to {high}")
    return value


def _wrong(value: object, where: str, accepted: str) -> ArgumentTypeError:
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    came = "null" if value is None else kinds.get(type(value), f"the number {value}")
    return ArgumentTypeError(where, "has the wrong JSON type", came=came, accepted=accepted)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = Counter(keys).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return result


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value
