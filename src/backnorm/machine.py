"""Properties of this machine that influence plans. They are detected once, or set by a test."""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass
from pathlib import Path

_CPU_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
_KIB = 1024

# Plans use at most this many bytes of the last-level cache. A virtual machine reports the whole
# cache of its processor, but shares the cache with other machines. On one such machine (Intel Xeon,
# 480 MiB), a core reads no faster from the cache than from memory. On that machine, plans whose
# writes bypass the cache were timed against plans that use the whole cache, in calls with one
# thread and with two. The arrays were float32; x, dy and dx together had 19 to 57 MiB. The plans
# that bypass the cache took 0.5 to 0.9 of the time of the plans that use the whole cache in a
# backward pass, 0.6 to 0.8 in a forward pass, and 0.55 to 0.75 in inference.
_MOST_SHARED = 32 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts about a machine's processors that plans depend on.

    Attributes
    ----------
    threads : int
        Processors this process may use.
    cache_per_core : int
        Bytes of the largest cache of a single core (usually L2).
    cache_shared : int
        Bytes of the last-level cache.
    name : str
        The name of the processor, for messages only.
    """

    threads: int
    cache_per_core: int
    cache_shared: int
    name: str


def counted(cache_shared: int) -> int:
    """Return how many of the `cache_shared` bytes of the last-level cache a plan may use."""
    return min(cache_shared, _MOST_SHARED)


@functools.cache
def detect() -> Machine:
    """Return this machine (the same object every time)."""
    private, shared = _cache_sizes()
    return Machine(processors(), private, shared, _name())


def processors() -> int:
    """Return how many processors this process may use now."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min(count, _container_quota(count)))


def _container_quota(otherwise: int) -> int:
    """Return how many processors the CPU quota of this process's cgroup allows, rounded up.

    If the cgroup has no quota, return `otherwise`.
    """
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return otherwise if quota == "max" else -(-int(quota) // int(period))
    except (OSError, ValueError):
        return otherwise


def _cache_sizes() -> tuple[int, int]:
    """Return the sizes of a core's own cache and of the shared cache, in bytes; a typical value
    replaces an unknown size.
    """
    levels: dict[int, int] = {}
    for folder in sorted(_CPU_FOLDER.glob("index*")) if _CPU_FOLDER.is_dir() else ():
        try:
            if (folder / "type").read_text().strip() == "Instruction":
                continue
            size = (folder / "size").read_text().strip()
            levels[int((folder / "level").read_text())] = int(size.rstrip("K")) * _KIB
        except (OSError, ValueError):
            continue
    private = levels.get(2, 1024 * _KIB)
    return private, max(levels.get(3, 0), private, 8 * 1024 * _KIB if 3 not in levels else 0)


def _name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
