"""Results as JSON files; `docs/bench.md` and `result.schema.json` describe every field."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.files import atomic_writer, check_writable
from backnorm.graph.strict_json import (
    expect_integer,
    expect_list,
    expect_object,
    expect_string,
    read_json,
)
from benchmarks.model import (
    CONDITIONS,
    ITEMSIZE,
    PASSES,
    Cell,
    Condition,
    Environment,
    Form,
    GpuFacts,
    Outcome,
    Result,
    Row,
    Timing,
)

__all__ = ["SCHEMA", "read_result", "write_result"]

#: Name and version of the format. Fields may be added under the same version, and readers ignore
#: those that they do not know; anything else needs a new one. Added so far: "gpu", and "whole" of
#: an outcome; files from before are of the CPU. And "condition"; files from before are quiet.
SCHEMA = "backnorm.bench/1"

_LAYOUTS = ("NCX", "NXC")
_TIMED = ("ok", "inaccurate")
_STATUSES = (*_TIMED, "missing", "unsupported", "crashed")
_MOST = 2**63 - 1


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
    ArgumentError
        Naming the file, the place in it, what is there and what is accepted.
    """
    path = Path(path)
    where = str(path)
    document = expect_object(read_json(path), where)
    schema = document.get("schema")
    if schema != SCHEMA:
        problem = "is not a result of benchmarks" if schema is None else "unknown format"
        raise ArgumentValueError(f"{where}: schema", problem, came=repr(schema), accepted=SCHEMA)
    return Result(
        environment=_environment(_at(document, "environment", where), f"{where}: environment"),
        settings=_settings(_at(document, "settings", where), f"{where}: settings"),
        gpu=_gpu(document["gpu"], f"{where}: gpu") if "gpu" in document else None,
        condition=_condition(document.get("condition", "quiet"), f"{where}: condition"),
        rows=tuple(
            _row(entry, f"{where}: rows[{i}]")
            for i, entry in enumerate(
                expect_list(_at(document, "rows", where), f"{where}: rows", most=100_000)
            )
        ),
    )


def _text(result: Result) -> str:
    """Return the JSON text: a line per row, so that a difference between files is one of cells."""
    head = {
        "schema": SCHEMA,
        "environment": asdict(result.environment),
        **({"gpu": asdict(result.gpu)} if result.gpu else {}),
        "condition": result.condition,
        "settings": result.settings,
    }
    rows = ",\n    ".join(json.dumps(_row_fields(row), allow_nan=False) for row in result.rows)
    opening = json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}")
    return f'{opening},\n  "rows": [\n    {rows}\n  ]\n}}\n'


def _row_fields(row: Row) -> dict[str, Any]:
    cell = row.cell
    return {
        "suite": cell.suite,
        "op": cell.op,
        "shape": cell.shape,
        "layout": cell.layout,
        "dtype": cell.dtype,
        "outcomes": [_outcome_fields(outcome) for outcome in row.outcomes],
    }


def _outcome_fields(outcome: Outcome) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "contestant": outcome.contestant,
        "form": outcome.form,
        "status": outcome.status,
    }
    if outcome.timing:
        fields["timing"] = asdict(outcome.timing)
    if outcome.whole:
        fields["whole"] = asdict(outcome.whole)
    if outcome.detail:
        fields["detail"] = outcome.detail
    return fields


def _environment(value: object, where: str) -> Environment:
    fields = expect_object(value, where)

    def text(name: str) -> str:
        return expect_string(_at(fields, name, where), f"{where}.{name}")

    def integer(name: str, low: int) -> int:
        return expect_integer(_at(fields, name, where), f"{where}.{name}", low=low, high=_MOST)

    versions = expect_object(_at(fields, "versions", where), f"{where}.versions")
    return Environment(
        cpu=text("cpu"),
        system=text("system"),
        python=text("python"),
        processors=integer("processors", 1),
        threads=integer("threads", 1),
        cache_per_core=integer("cache_per_core", 0),
        cache_shared=integer("cache_shared", 0),
        versions={
            name: expect_string(version, f"{where}.versions.{name}")
            for name, version in versions.items()
        },
        date=text("date"),
    )


def _gpu(value: object, where: str) -> GpuFacts:
    fields = expect_object(value, where)

    def text(name: str) -> str:
        return expect_string(_at(fields, name, where), f"{where}.{name}")

    def integer(name: str, low: int) -> int:
        return expect_integer(_at(fields, name, where), f"{where}.{name}", low=low, high=_MOST)

    return GpuFacts(
        name=text("name"),
        capability=text("capability"),
        multiprocessors=integer("multiprocessors", 1),
        memory=integer("memory", 1),
        cache=integer("cache", 0),
        driver=text("driver"),
        cuda=text("cuda"),
        clock=integer("clock", 0),
        memory_clock=integer("memory_clock", 0),
        bandwidth=_positive(
            _at(fields, "bandwidth", where), f"{where}.bandwidth", "a speed", "bytes a second"
        ),
    )


def _condition(value: object, where: str) -> Condition:
    for condition in CONDITIONS:
        if value == condition:
            return condition
    raise ArgumentValueError(
        where, "unknown value", came=repr(value), accepted=", ".join(CONDITIONS)
    )


def _settings(value: object, where: str) -> dict[str, float | int | str]:
    settings: dict[str, float | int | str] = {}
    for name, setting in expect_object(value, where).items():
        if isinstance(setting, bool) or not isinstance(setting, float | int | str):
            raise ArgumentTypeError(
                f"{where}.{name}", "has the wrong JSON type", accepted="a number or a string"
            )
        settings[name] = setting
    return settings


def _row(value: object, where: str) -> Row:
    fields = expect_object(value, where)
    shape = expect_list(_at(fields, "shape", where), f"{where}.shape", most=16)
    if len(shape) < 2:
        raise ArgumentValueError(
            f"{where}.shape", "has too few axes", came=shape, accepted="(N, C, spatial ...)"
        )
    outcomes = expect_list(_at(fields, "outcomes", where), f"{where}.outcomes", most=1000)
    return Row(
        cell=Cell(
            suite=expect_string(_at(fields, "suite", where), f"{where}.suite"),
            op=_one_of(fields, "op", tuple(PASSES), where),
            shape=tuple(
                expect_integer(extent, f"{where}.shape[{i}]", low=1, high=_MOST)
                for i, extent in enumerate(shape)
            ),
            layout=_one_of(fields, "layout", _LAYOUTS, where),
            dtype=_one_of(fields, "dtype", tuple(ITEMSIZE), where),
        ),
        outcomes=tuple(
            _outcome(entry, f"{where}.outcomes[{i}]") for i, entry in enumerate(outcomes)
        ),
    )


def _outcome(value: object, where: str) -> Outcome:
    fields = expect_object(value, where)
    status = _one_of(fields, "status", _STATUSES, where)
    timed = status in _TIMED
    if timed != ("timing" in fields):
        problem = "is missing" if timed else "must be absent"
        raise ArgumentValueError(f"{where}.timing", f"{problem} where the status is {status!r}")
    if "whole" in fields and not timed:
        raise ArgumentValueError(f"{where}.whole", f"must be absent where the status is {status!r}")
    return Outcome(
        contestant=expect_string(_at(fields, "contestant", where), f"{where}.contestant"),
        form=_one_of(fields, "form", get_args(Form), where),
        status=status,
        timing=_timing(fields["timing"], f"{where}.timing") if "timing" in fields else None,
        detail=expect_string(fields.get("detail", ""), f"{where}.detail"),
        whole=_timing(fields["whole"], f"{where}.whole") if "whole" in fields else None,
    )


def _timing(value: object, where: str) -> Timing:
    fields = expect_object(value, where)
    p20, median, p80 = (
        _seconds(_at(fields, name, where), f"{where}.{name}") for name in ("p20", "median", "p80")
    )
    if not p20 <= median <= p80:
        raise ArgumentValueError(
            where, "is out of order", came=(p20, median, p80), accepted="p20 <= median <= p80"
        )
    samples = expect_integer(_at(fields, "samples", where), f"{where}.samples", low=1, high=_MOST)
    return Timing(median, p20, p80, samples)


def _seconds(value: object, where: str) -> float:
    return _positive(value, where, "a time", "seconds", below=1e9)


def _positive(
    value: object, where: str, what: str, unit: str, below: float = float("inf")
) -> float:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise ArgumentTypeError(where, "has the wrong JSON type", accepted="a number")
    # An integer of JSON can be too large for a float.
    if not 0 < value < below or not _is_float(value):
        raise ArgumentValueError(where, f"is not {what}", came=value, accepted=f"{unit}, above 0")
    return float(value)


def _is_float(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _one_of(fields: dict[str, object], name: str, accepted: tuple[str, ...], where: str) -> Any:
    value = expect_string(_at(fields, name, where), f"{where}.{name}")
    if value not in accepted:
        raise ArgumentValueError(
            f"{where}.{name}", "unknown value", came=repr(value), accepted=", ".join(accepted)
        )
    return value


def _at(fields: dict[str, object], name: str, where: str) -> object:
    if name not in fields:
        raise ArgumentValueError(where, f"lacks the key {name!r}")
    return fields[name]
