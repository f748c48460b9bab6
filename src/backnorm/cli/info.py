"""What `backnorm info` knows: versions, machine and cache; dialects; operators."""

from __future__ import annotations

import platform
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import backnorm
from backnorm import config, machine
from backnorm.dialects import registry
from backnorm.errors import ArgumentValueError

__all__ = ["describe"]

_NEEDED = ("numpy", "numba", "llvmlite", "ml_dtypes", "typer", "rich")
# Looked up, not imported.
_OPTIONAL = ("torch", "jax", "tensorflow", "tensorflow-cpu", "triton", "onednn-cpu-gomp")


def describe(dialect: str | None = None, op: str | None = None) -> dict[str, object]:
    """Return, as plain values, facts about the installation, a dialect, or an operator.

    Returns
    -------
    dict
        Without arguments: ``versions``, ``machine``, ``threads``, ``cache``, ``dialects``. With a
        dialect: ``dialect``, ``operators``. With an operator: ``dialect``, ``op``, ``schemas``
        (one for each revision of the specification).

    Raises
    ------
    ArgumentValueError
        If there is no such dialect or operator.
    """
    if dialect is None:
        return _installation()
    if op is None:
        return {"dialect": dialect, "operators": _operators(dialect)}
    operator = registry.operator(dialect, op)
    schemas = getattr(operator, "schemas", {"": operator.schema}).values()
    return {"dialect": dialect, "op": op, "schemas": [schema.to_dict() for schema in schemas]}


def _installation() -> dict[str, object]:
    return {
        "versions": _versions(),
        "machine": asdict(machine.detect()),
        "threads": backnorm.get_num_threads(),
        "cache": _cache(config.cache_directory()),
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


def _cache(folder: Path) -> dict[str, object]:
    """Return where compiled kernels are kept, and how many files and bytes are there."""
    try:
        sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    except OSError as error:
        raise ArgumentValueError(str(folder), "the cache cannot be read") from error
    return {"folder": str(folder), "files": len(sizes), "bytes": sum(sizes)}
