"""How names and outcomes read, on every page alike."""

from __future__ import annotations

from collections.abc import Iterable

from backnorm.bench.model import Cell, Environment, Form, Result, Row
from backnorm.report.words import TIMES, bytes_text

__all__ = [
    "STATUS_MARKS",
    "environment_lines",
    "label",
    "legend",
    "settings_lines",
    "shape_text",
]

#: What stands in a table for an outcome without a time, or beside one that is not right.
STATUS_MARKS = {
    "inaccurate": "‡",
    "missing": "not installed",
    "unsupported": "n/s",
    "crashed": "crashed",
}

_LABELS = {
    "torch": "PyTorch",
    "tensorflow": "TensorFlow",
    "jax": "JAX",
    "onednn": "oneDNN",
    "numpy": "NumPy",
}
_STATUS_WORDS = {
    "inaccurate": "computed and timed, but less exact than a float32 implementation should be",
    "missing": "",
    "unsupported": "does not support this",
    "crashed": "ended its process",
}
_SETTINGS = {
    "rounds": "Turns of each call",
    "samples": "Samples of a turn",
    "warm": "Seconds of calls that do not count, at the beginning of a turn",
    "least": "Seconds of a sample, at the least",
    "limit": "Seconds after which a call gets no further turn",
}
_MOST_DETAILS = 3


def label(contestant: str, form: Form | None = None) -> str:
    """Return a contestant's name, with its form if one is given."""
    name = _LABELS.get(contestant, contestant)
    return name if form is None else f"{name} ({form})"


def shape_text(cell: Cell) -> str:
    """Return the shape as 50 x 64 x 112 x 112 with multiplication signs."""
    return TIMES.join(map(str, cell.shape))


def environment_lines(environment: Environment) -> list[tuple[str, str]]:
    """Return names and values of where a benchmark ran."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    per_core, shared = (
        bytes_text(size) for size in (environment.cache_per_core, environment.cache_shared)
    )
    return [
        ("Processor", environment.cpu),
        ("Processors, threads used", f"{environment.processors}, {environment.threads}"),
        ("Cache", f"{per_core} a core, {shared} shared"),
        ("System", environment.system),
        ("Python", environment.python),
        ("Versions", versions),
        ("Date", environment.date),
    ]


def settings_lines(result: Result) -> list[tuple[str, str]]:
    """Return names and values of how a benchmark was run."""
    return [
        (_SETTINGS.get(name, name.replace("_", " ")), str(value))
        for name, value in result.settings.items()
    ]


def legend(rows: Iterable[Row]) -> list[str]:
    """Return a line for every contestant and status other than "ok", with the first reasons."""
    cells: dict[tuple[str, str], int] = {}
    details: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        for outcome in row.outcomes:
            if outcome.status == "ok":
                continue
            key = (outcome.contestant, outcome.status)
            cells[key] = cells.get(key, 0) + 1
            if outcome.detail:
                details.setdefault(key, {})[outcome.detail] = None
    lines = []
    for (contestant, status), count in cells.items():
        reasons = list(details.get((contestant, status), {}))
        more = [f"and {len(reasons) - _MOST_DETAILS} more"] if len(reasons) > _MOST_DETAILS else []
        told = "; ".join([*reasons[:_MOST_DETAILS], *more])
        lines.append(
            f"{STATUS_MARKS[status]}: {f'{label(contestant)} {_STATUS_WORDS[status]}'.strip()} "
            f"({count} time{'s' if count > 1 else ''}{': ' + told if told else ''})"
        )
    return lines
