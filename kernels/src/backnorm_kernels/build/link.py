"""Link object code to a shared library, with the system's linker or that of the package ziglang."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from backnorm_kernels.seal import sealed


def command() -> list[str]:
    """Return the command of a C compiler, which is used as linker.

    Raises
    ------
    RuntimeError
        If no C compiler is found.
    """
    wanted = os.environ.get("CC", "cc").split()
    if shutil.which(wanted[0]):
        return wanted
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise RuntimeError(
        f"no linker found: no command {wanted[0]}; install a C compiler, or ziglang (pip)"
    )


def link(code: bytes, path: Path, exported: list[str]) -> None:
    """Write a shared library that exports the given symbols. The library appears at `path` only
    when it is complete.

    Raises
    ------
    RuntimeError
        If there is no linker, or it failed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is made in the folder of `path`, so that both are on the same file
    # system. The finished library can then be moved to `path` in one step. The linker runs in the
    # temporary folder and gets names of files without that folder's path, so the library's bytes do
    # not depend on the folder's name.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as folder:
        (Path(folder) / "code.o").write_bytes(code)
        names = "".join(f"{name};" for name in exported)
        (Path(folder) / "symbols").write_text(f"{{ global: {names} local: *; }};\n")
        options = ["-shared", "-nostartfiles", "-s", "-Wl,--build-id=none", "-Wl,--no-undefined"]
        options += [
            "-Wl,-z,noexecstack",
            "-Wl,-z,now",
            "-Wl,--version-script=symbols",
            f"-Wl,-soname,{path.stem}",
        ]
        # libm is linked, because code for processors without fused multiply-add calls its `fma`
        # functions.
        options += ["-o", "library.so", "code.o", "-lm", "-lc"]
        done = subprocess.run(  # noqa: S603 (our own object code)
            [*command(), *options], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"linking {path.name} failed: {done.stderr.strip()}")
        made = Path(folder, "library.so")
        made.write_bytes(sealed(made.read_bytes()))
        made.replace(path)
