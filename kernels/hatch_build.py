"""The build backend: hatchling, with a hook that compiles the kernels of a wheel.

A wheel contains compiled libraries and no compiler, so one wheel serves every Python and NumPy.
BACKNORM_BUILD_LEVELS chooses the processors that the wheel serves: unset, processors like this one;
``all``, every x86-64 processor; otherwise names of levels, separated by commas. An editable
installation uses the libraries of the checkout.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hatchling.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

# The oldest C library that the tag of a wheel names (manylinux2014).
_OLDEST_GLIBC = (2, 17)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: dict[str, Any] | None = None
) -> str:
    """Write the metadata of a wheel without its libraries, as PEP 517 defines it.

    Under pip, hatchling omits this function, because a hook can add dependencies to the metadata.
    pip would then build the whole wheel to read the metadata. The hook below adds no dependencies.
    """
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HATCH_BUILD_NO_HOOKS"] = "true"
        try:
            wheel = build_wheel(folder, config_settings)
        finally:
            del os.environ["HATCH_BUILD_NO_HOOKS"]
        with zipfile.ZipFile(Path(folder, wheel)) as archive:
            (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            archive.extract(name, metadata_directory)
    return Path(name).parent.name


class MachineCode(BuildHookInterface):
    """Compiles the libraries that are missing and adds all that were chosen to the wheel."""

    def dependencies(self) -> list[str]:
        """Return a package with a linker if there is no C compiler."""
        compiler = os.environ.get("CC", "cc").split()[0]
        return [] if shutil.which(compiler) else ["ziglang==0.17.1"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile libraries into the sources' own folder and include them."""
        if version == "editable":
            return
        sys.path.insert(0, str(Path(self.root, "src")))
        from backnorm_kernels.build import make
        from backnorm_kernels.build.demand import file_of, levels_here
        from backnorm_kernels.levels import FOLDER, LEVELS, is_x86

        known = tuple(LEVELS) if is_x86() else ()
        chosen = os.environ.get("BACKNORM_BUILD_LEVELS", "")
        levels = tuple(name for name in chosen.split(",") if name)
        if unknown := sorted({*levels} - {*known, "all"}):
            raise ValueError(
                "BACKNORM_BUILD_LEVELS must be all or names of levels, separated by commas; "
                f"got {', '.join(unknown)}; expected {', '.join(('all', *known))}"
            )
        every = "all" in levels
        if every:
            levels = known
        wanted = make.of_levels(levels) if levels else make.of_this_processor()
        if absent := make.missing(wanted, FOLDER):
            served = ", ".join(levels) or f"processors like this one ({levels_here()[0]})"
            self.app.display_waiting(
                f"backnorm: compiling {len(absent)} libraries for {served}; this takes minutes"
            )
        make.build_missing(wanted, FOLDER)
        paths = [file_of(name, level, FOLDER) for level, name in wanted]
        for path in paths:
            included = path.relative_to(FOLDER).as_posix()
            build_data["force_include"][str(path)] = f"backnorm_kernels/lib/{included}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform(paths if every else ())}"


def _platform(paths: Iterable[Path]) -> str:
    """Return the platform tag: manylinux by the C library that `paths` need, else this machine's.

    A wheel for some processors must not be published as one for every processor of the platform.
    Without paths, the tag is therefore ``linux_*``, which package indexes reject.
    """
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    needed = {
        (int(major), int(minor))
        for path in paths
        for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", path.read_bytes())
    }
    if not needed or not platform.startswith("linux_"):
        return platform
    major, minor = max(_OLDEST_GLIBC, *needed)
    return platform.replace("linux_", f"manylinux_{major}_{minor}_", 1)
