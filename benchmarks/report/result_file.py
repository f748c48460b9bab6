"""Results as JSON files; `docs/bench.md` describes every field, `benchmarks.model` their values."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from backnorm.errors import ArgumentValueError
from backnorm.files import atomic_writer, check_writable
from benchmarks.model import Cell, Condition, Environment, GpuFacts, Outcome, Result, Row

__all__ = ["SCHEMA", "read_result", "write_result"]

#: Name and version of the format. Fields may be added under the same version, and readers ignore
#: those that they do not know; anything else needs a new one. Added so far: "gpu", and "whole" of
#: an outcome; files from before are of the CPU. And "condition"; files from before are quiet. And
#: "microarchitecture" of the environment.
SCHEMA: Literal["backnorm.bench/1"] = "backnorm.bench/1"


@dataclass(frozen=True, slots=True)
class _Line(Cell):
    """A row: what identifies the cell, and the outcomes beside it."""

    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class _File:
    # pydantic reads this; numbers are numbers, and NaN and infinity are none.
    __pydantic_config__ = ConfigDict(strict=True, allow_inf_nan=False)

    schema: Literal["backnorm.bench/1"]
    environment: Environment
    settings: dict[str, float | int | str]
    rows: tuple[_Line, ...]
    gpu: GpuFacts | None = None
    condition: Condition = "quiet"


_FILE = TypeAdapter(_File)


def write_result(result: Result, path: str | Path) -> None:
    """Write `result` to the JSON file `path`, whole or not at all.

    Parameters
    ----------
    result : Result
    path : str or Path
        Replaced if it exists; its folder must exist.

    Raises
    ------
    ArgumentValueError
        If `path` cannot be written, or a number of `result` is not finite.
    """
    path = Path(path)
    check_writable(path)
    try:
        text = _text(result)
    except ValueError as error:
        raise ArgumentValueError("result", "holds a number that JSON cannot: NaN or inf") from error
    with atomic_writer(path) as stream:
        stream.write(text.encode())


def read_result(path: str | Path) -> Result:
    """Return the result in the JSON file `path`, every field checked.

    Raises
    ------
    ArgumentValueError
        Naming the file, the place in it, what is there and what is accepted.
    OSError
        If it cannot be read.
    """
    try:
        file = _FILE.validate_json(Path(path).read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in first["loc"])
        came = " ".join(repr(first["input"]).split())
        raise ArgumentValueError(
            f"{path}{': ' * bool(place)}{place.removeprefix('.')}",
            first["msg"],
            came=came if len(came) < 60 else f"{came[:60]}...",
        ) from None
    rows = (
        Row(Cell(*(getattr(line, name) for name in Cell.__match_args__)), line.outcomes)
        for line in file.rows
    )
    return Result(file.environment, file.settings, tuple(rows), file.gpu, file.condition)


def _text(result: Result) -> str:
    """Return the JSON text: a line per row, so that a difference between files is one of cells."""
    head = {
        "schema": SCHEMA,
        "environment": asdict(result.environment),
        **({"gpu": asdict(result.gpu)} if result.gpu else {}),
        "condition": result.condition,
        "settings": result.settings,
    }
    rows = (
        {**asdict(row.cell), "outcomes": [_filled(asdict(outcome)) for outcome in row.outcomes]}
        for row in result.rows
    )
    lines = ",\n    ".join(json.dumps(row, allow_nan=False) for row in rows)
    opening = json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}")
    return f'{opening},\n  "rows": [\n    {lines}\n  ]\n}}\n'


def _filled(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that say something."""
    return {name: value for name, value in fields.items() if value not in (None, "")}
