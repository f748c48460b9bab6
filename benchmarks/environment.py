"""The machine of a run: its properties and its free memory."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backnorm import machine

__all__ = ["available_memory", "environment"]

_CGROUP = Path("/sys/fs/cgroup")


def environment(
    command: str, threads: int, versions: Mapping[str, str], **more: Any
) -> dict[str, Any]:
    """Return the facts of a run and of this machine."""
    found = machine.detect()
    return {
        "command": command,
        "cpu": found.name,
        "microarchitecture": _microarchitecture(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "processors": os.cpu_count() or 1,
        "threads": threads,
        "cache_per_core": found.cache_per_core,
        "cache_shared": found.cache_shared,
        "versions": dict(versions),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **more,
    }


def available_memory() -> float:
    """Return the bytes that can still be allocated; infinity if unknown."""
    return min(_free_memory(), _quota())


def _microarchitecture() -> str:
    """Return LLVM's name of the microarchitecture; a cloud may name all processors alike."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        # Only a checkout has the kernels' compiler.
        return ""
    return str(llvm.get_host_cpu_name())


def _free_memory() -> float:
    """Return the free memory of the system in bytes; infinity if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return float("inf")


def _quota() -> float:
    """Return the bytes that the container may still use; its page cache can be freed."""
    try:
        most = int((_CGROUP / "memory.max").read_text())
        taken = int((_CGROUP / "memory.current").read_text())
        statistics = (_CGROUP / "memory.stat").read_text().splitlines()
        cached = next(int(line.split()[1]) for line in statistics if line.startswith("file "))
    except (OSError, ValueError, StopIteration):
        return float("inf")
    return most - taken + cached
