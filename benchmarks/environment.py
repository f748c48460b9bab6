"""Where a benchmark runs, how much memory is left there, and files of what was measured there."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backnorm import machine
from backnorm.files import atomic_writer
from benchmarks.model import Environment

__all__ = ["available_memory", "environment", "now", "write_rows"]

_CGROUP = Path("/sys/fs/cgroup")


def now() -> str:
    """Return the time, ISO 8601, UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def environment(threads: int, versions: Mapping[str, str], date: str) -> Environment:
    """Return this machine, with what ran on it and when that began."""
    found = machine.detect()
    return Environment(
        cpu=found.name,
        system=platform.platform(),
        python=platform.python_version(),
        processors=os.cpu_count() or 1,
        threads=threads,
        cache_per_core=found.cache_per_core,
        cache_shared=found.cache_shared,
        versions=dict(versions),
        date=date,
        microarchitecture=_microarchitecture(),
    )


def write_rows(rows: Sequence[Mapping[str, Any]], where: Environment, path: Path) -> None:
    """Write what was measured, and where, to a JSON file, whole or not at all."""
    file = {"environment": dataclasses.asdict(where), "rows": list(rows)}
    with atomic_writer(path) as stream:
        stream.write(json.dumps(file, indent=1, allow_nan=False).encode() + b"\n")


def available_memory() -> float:
    """Return the bytes that can still be taken; infinity where the system does not tell."""
    return min(machine.free_memory(), _quota())


def _microarchitecture() -> str:
    # Of the kernels' compiler, which a checkout has and an installed package has not.
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return ""
    return str(llvm.get_host_cpu_name())


def _quota() -> float:
    """Return what the container may still take; its page cache counts, but can be freed."""
    try:
        most = int((_CGROUP / "memory.max").read_text())
        taken = int((_CGROUP / "memory.current").read_text())
        statistics = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in statistics if line.startswith("file "))
    except (OSError, ValueError, StopIteration):
        return float("inf")
    return most - taken + cached
