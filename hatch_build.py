"""What a wheel is built with: its machine code (a hook of hatchling, the build backend).

A wheel has the libraries of all levels of processors, and nothing that could make others: it is one
for every Python and NumPy. BACKNORM_BUILD_LEVELS chooses fewer: names of levels, separated by
commas, or ``own`` for what this processor uses. An editable installation is of the sources, and has
none.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The oldest C library that wheels are marked for, as everywhere.
_OLDEST = (2, 17)


class MachineCode(BuildHookInterface):
    """Compiles what is missing, and puts it into the wheel."""

    def dependencies(self) -> list[str]:
        """Return a package that links, where no C compiler does."""
        compiler = os.environ.get("CC", "cc").split()[0]
        return [] if shutil.which(compiler) else ["ziglang==0.17.1"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build libraries in the sources' own folder, and include them."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from backnorm.cpu import library
        from backnorm.cpu.build import make
        from backnorm.cpu.build.demand import place
        from backnorm.cpu.levels import LEVELS, is_x86

        chosen = os.environ.get("BACKNORM_BUILD_LEVELS", "")
        every = is_x86() and not chosen
        levels = tuple(LEVELS) if every else tuple(name for name in chosen.split(",") if name)
        if unknown := sorted({*levels} - {*LEVELS, "own"}):
            raise ValueError(
                f"BACKNORM_BUILD_LEVELS has {unknown}; accepted: {', '.join(LEVELS)}, own"
            )
        own = not levels or "own" in levels
        wanted = make.of_this_processor() if own else make.of_levels(levels)
        make.build_missing(wanted, library.FOLDER)
        paths = [place(name, level, library.FOLDER) for level, name in wanted]
        for path in paths:
            included = path.relative_to(library.FOLDER).as_posix()
            build_data["force_include"][str(path)] = f"backnorm/cpu/lib/{included}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(paths if every else ())}"


def _platform(paths: Iterable[Path]) -> str:
    """Return the platform of a wheel with libraries for all processors; without: for this one."""
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    needed = {
        (int(major), int(minor))
        for path in paths
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
    }
    if not needed or not platform.startswith("linux_"):
        return platform
    major, minor = max(_OLDEST, *needed)
    return platform.replace("linux_", f"manylinux_{major}_{minor}_", 1)
