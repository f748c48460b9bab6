"""The source files of each library, and the versions of what compiles them. Their digest is part
of the library's file name.
"""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path

from backnorm_kernels.kinds import PROBE, THREADS, XLA

_CPU = Path(__file__).parent.parent

# The source files from which no library of kernels is built, by the names of other libraries.
_SPECIAL = {
    XLA: ("kernels/xla_frame.py", "kernels/xla_handler.py", "xla_structures.py"),
    THREADS: ("kernels/pool.py", "kernels/team.py", "slots.py"),
}
_COMPILER = ("build/compile.py", "build/link.py", "build/machine.py")
_DESCRIPTIONS = ("record.py", "scratch.py", "seal.py")
# The packages whose versions the machine code depends on.
_PACKAGES = ("numba", "llvmlite")


@functools.cache
def digest(name: str) -> str:
    """Return 16 hexadecimal digits that identify a library's sources and the compiler's version."""
    # The probe, the library that detects the processor's level, contains no kernels, so the digest
    # of its sources does not include the kernels' modules.
    paths = {*_COMPILER, *_DESCRIPTIONS}
    if name != PROBE:
        special = {path for other in _SPECIAL.values() for path in other}
        kernels = {f"kernels/{path.name}" for path in (_CPU / "kernels").glob("*.py")}
        paths |= {"build/frontend.py", "kinds.py", "levels.py", *_SPECIAL.get(name, ())}
        paths |= kernels - {"kernels/__init__.py", *special}
    found = hashlib.sha256()
    for package in _PACKAGES:
        found.update(f"{package} {_version(package)}\n".encode())
    for path in sorted(paths):
        found.update(f"{path}\n".encode())
        found.update((_CPU / path).read_bytes())
    return found.hexdigest()[:16]


def _version(package: str) -> str:
    """Return the version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
