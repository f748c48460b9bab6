"""What `backnorm info` knows: versions, machine and machine code; dialects; operators."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from dataclasses import asdict
from importlib import metadata

import backnorm
from backnorm import machine
from backnorm.cpu import library
from backnorm.cpu.kinds import LIBRARIES, PROBE
from backnorm.cpu.threads import service
from backnorm.dialects import registry
from backnorm.errors import MachineCodeError

__all__ = ["describe"]

_NEEDED = ("numpy", "ml_dtypes", "typer", "rich")
# Looked up, not imported.
_OPTIONAL = ("torch", "jax", "tensorflow", "tensorflow-cpu", "triton", "onednn-cpu-gomp")


def describe(dialect: str | None = None, op: str | None = None) -> dict[str, object]:
    """Return, as plain values, facts about the installation, a dialect, or an operator.

    Returns
    -------
    dict
        Without arguments: ``versions``, ``machine``, ``threads``, ``threads_of``, ``machine_code``,
        ``dialects``.
        With a dialect: ``dialect``, ``operators``. With an operator: ``dialect``, ``op``,
        ``schemas`` (one for each revision of the specification).

    Raises
    ------
    ArgumentValueError
        If there is no such dialect or operator, or no such level as BACKNORM_CPU_LEVEL names.
    """
    if dialect is None:
        return _installation()
    if op is None:
        return {"dialect": dialect, "operators": _operators(dialect)}
    operator = registry.operator(dialect, op)
    schemas = [schema.to_dict() for schema in operator.schemas.values()]
    return {"dialect": dialect, "op": op, "schemas": schemas}


def _installation() -> dict[str, object]:
    return {
        "versions": _versions(),
        "machine": asdict(machine.detect()),
        "threads": backnorm.get_num_threads(),
        "threads_of": asdict(service()),
        "machine_code": _machine_code(),
        "dialects": {name: list(registry.operators(name)) for name in registry.DIALECTS},
    }


def _operators(dialect: str) -> list[dict[str, object]]:
    return [
        {
            "op": name,
            "operation": operator.schema.operation,
            "summary": operator.schema.summary,
            "source": operator.schema.source,
        }
        for name, operator in registry.operators(dialect).items()
    ]


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "backnorm": backnorm.__version__,
        "python": platform.python_version(),
    }
    for package in (*_NEEDED, *_OPTIONAL):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _machine_code() -> dict[str, object]:
    """Return the level of this processor, and which libraries there are for it, of which levels."""
    names = sorted(LIBRARIES.keys() - {PROBE})
    try:
        level = library.level()
    except MachineCodeError:
        # Without any there is nothing that could tell.
        level = None
    paths = {name: library.path_of(name) for name in names} if level else {}
    found = {name: path for name, path in paths.items() if path}
    digests = [f"{name}-{library.digest(name)}" for name in found]
    return {
        "level": level,
        "folder": str(library.FOLDER),
        "digest": hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16] if found else None,
        "libraries": dict(Counter(path.parent.name for path in found.values())),
        "missing": [name for name in names if name not in found],
        "functions": sum(len(LIBRARIES[name].kinds) for name in found),
    }
