"""What backnorm imports of this package: see `backnorm.engines`."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import asdict

from backnorm.errors import MachineCodeError
from backnorm.layout import Extents
from backnorm.machine import Machine
from backnorm.problem import Problem
from backnorm.version import __version__ as version_of_backnorm
from backnorm_kernels import __version__, levels, library, xla
from backnorm_kernels.kinds import LIBRARIES, PROBE
from backnorm_kernels.launch import Launch
from backnorm_kernels.plan import Plan, plan
from backnorm_kernels.record import SLOTS
from backnorm_kernels.threads import service
from backnorm_kernels.xla_structures import ELEMENTS

__all__ = ["ELEMENTS", "SLOTS", "facts", "planned", "xla"]

if version_of_backnorm != __version__:
    raise MachineCodeError(
        f"backnorm {version_of_backnorm} and backnorm-kernels {__version__} do not belong "
        "together; install both from one checkout: pip install . ./kernels"
    )


def planned(
    problem: Problem, extents: Extents, machine: Machine, header: int
) -> tuple[Plan, Launch]:
    """Return the plan of a problem for a machine, and the kernels of this plan."""
    decided = plan(problem, extents, machine)
    return decided, Launch(problem, decided, header)


def facts() -> dict[str, object]:
    """Return facts about the threads and the machine code, as plain values, for `backnorm info`.

    Returns
    -------
    dict
        ``threads_of``: see `threads.Service`. ``machine_code``: the level of this processor, and
        facts about the libraries that were built for it.
    """
    return {"threads_of": asdict(service()), "machine_code": _machine_code()}


def _machine_code() -> dict[str, object]:
    names = sorted(LIBRARIES.keys() - {PROBE})
    try:
        level = library.level()
    except MachineCodeError:
        # `level` raises this error if the library that detects the level is not built.
        level = None
    paths = {name: library.path_of(name) for name in names} if level else {}
    found = {name: path for name, path in paths.items() if path}
    digests = [f"{name}-{library.digest(name)}" for name in found]
    return {
        "level": level,
        "folder": str(levels.FOLDER),
        "digest": hashlib.sha256("\n".join(digests).encode()).hexdigest()[:16] if found else None,
        "libraries": dict(Counter(path.parent.name for path in found.values())),
        "missing": [name for name in names if name not in found],
        "functions": sum(len(LIBRARIES[name].kinds) for name in found),
    }
