"""The source files of each library. Their digest is part of the library's file name."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from backnorm_kernels.kinds import LIBRARIES

_CPU = Path(__file__).parent.parent

# For each family of libraries, the source files that no other family is built from.
_OF_FAMILY = {
    "segments": ("kernels/segments.py",),
    "columns": ("kernels/columns.py", "kernels/tiles.py"),
    "floor": ("kernels/floor.py",),
    "xla": (
        "kernels/xla_frame.py",
        "kernels/xla_handler.py",
        "xla_structures.py",
    ),
    "threads": ("kernels/pool.py", "kernels/team.py", "slots.py"),
}
_COMMON = (
    "build/compile.py",
    "build/frontend.py",
    "build/link.py",
    "build/machine.py",
    "kinds.py",
    "levels.py",
    "record.py",
    "scratch.py",
    "seal.py",
)


def digest(name: str) -> str:
    """Return 16 hexadecimal digits that identify the sources of a library."""
    return _of_family(LIBRARIES[name].family)


@functools.cache
def _of_family(family: str) -> str:
    special = {path for paths in _OF_FAMILY.values() for path in paths}
    kernels = {f"kernels/{path.name}" for path in (_CPU / "kernels").glob("*.py")}
    kernels -= {"kernels/__init__.py", *special}
    used = {*_COMMON, *_OF_FAMILY.get(family, ()), *kernels}
    # The probe, the library that detects the processor's level, contains no kernels, so the digest
    # of its sources does not include the kernels' modules.
    paths = (
        sorted(used)
        if family != "probe"
        else [
            "build/compile.py",
            "build/link.py",
            "build/machine.py",
            "record.py",
            "scratch.py",
            "seal.py",
        ]
    )
    found = hashlib.sha256()
    for path in paths:
        found.update(f"{path}\n".encode())
        found.update((_CPU / path).read_bytes())
    return found.hexdigest()[:16]
