"""The process that builds libraries of one level: ``python -m backnorm_kernels.build.compile``.

Each level needs a process of its own, because Numba chooses its target processor when it is
imported. The process prints a line of JSON for each library.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

from backnorm_kernels.build import machine
from backnorm_kernels.build.link import link
from backnorm_kernels.build.sources import digest
from backnorm_kernels.kinds import LIBRARIES, PROBE, THREADS, XLA, Kind
from backnorm_kernels.record import LAYOUT


def module_of(name: str) -> tuple[Any, list[str]]:
    """Return the unoptimised LLVM module of a library, and the symbols that it exports."""
    import llvmlite.binding as llvm

    version = f"@bn_layout = constant i64 {LAYOUT}\n"
    if name == PROBE:
        module = llvm.parse_assembly(machine.probe() + version)
        return module, _visible(module)
    from numba import types

    from backnorm_kernels.build.frontend import linked

    if name in (XLA, THREADS):
        from backnorm_kernels.kernels import team, xla_handler

        source = {XLA: xla_handler, THREADS: team}[name]
        entries, code = source.entries(), source.data()
    else:
        kinds = LIBRARIES[name].kinds
        types_ = (types.int64, types.int64)
        entries = {kind.symbol: (_function(kind), (_of(kind), *types_)) for kind in kinds}
        code = ""
    module = linked(entries, code + version)
    return module, _visible(module)


def _visible(module: Any) -> list[str]:
    every = (*module.functions, *module.global_variables)
    return sorted(v.name for v in every if not v.is_declaration and v.name.startswith("bn_"))


def _function(kind: Kind) -> Any:
    from backnorm_kernels.kernels import columns, segments

    return {"segments": segments, "columns": columns}[kind.geometry].run


def _of(kind: Kind) -> Any:
    """Return the Numba type that stands for a kind. A kernel's first argument has this type."""
    from numba import types

    from backnorm_kernels.kernels import record

    elements = {
        "float64": types.float64,
        "float32": types.float32,
        "float16": types.uint16,
        "bfloat16": types.int16,
    }
    return record.Kind(elements[kind.element], elements[kind.arithmetic], kind.direction)


def main(level: str, folder: str, *names: str) -> None:
    """Build the libraries `names` of a level into a folder."""
    # Garbage collection would take a seventh of the time of this process and free little, because
    # most of Numba's objects live as long as the process.
    gc.disable()
    target = machine.target_machine(level)
    for name in names:
        start = time.process_time()
        module, exported = module_of(name)
        code = machine.object_of(machine.optimised(module, target), target)
        path = Path(folder) / f"{name}-{digest(name)}.so"
        link(code, path, exported)
        seconds = time.process_time() - start
        print(json.dumps({"name": name, "seconds": seconds, "bytes": path.stat().st_size}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
