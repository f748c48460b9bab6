"""Where a benchmark runs, and how much memory is left there."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from backnorm import machine
from benchmarks.model import Environment

__all__ = ["available_memory", "environment", "now"]

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
    )


def available_memory() -> float:
    """Return the bytes that can still be taken; infinity where the system does not tell."""
    return min(machine.free_memory(), _quota())


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
