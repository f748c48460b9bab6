"""Build the wheel, install it in a fresh environment of every supported Python, and run its demo.

    python scripts/wheel_check.py

`pyproject.toml` names the supported Pythons; those on PATH or in pyenv are used. The wheel must
contain only the library and the command. It must not install a framework, or a package that only
tests, benchmarks, examples or the documentation need. The first failure ends the script with status
1. BACKNORM_BUILD_LEVELS selects the levels of processors that the wheel is built for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

_TOP = re.compile(r"backnorm/|_backnorm_pytest\.py$|backnorm-[^/]+\.dist-info/")
# Parts of paths that must not be in the wheel.
_STRANGE = re.compile(
    r"(^|/)(tests?|test_[^/]*|check_[^/]*|conftest\.py|bench[^/]*|examples?|training|docs?)(/|$)"
)


def strangers(names: Iterable[str]) -> list[str]:
    """Return the files of a wheel that belong neither to the library nor to the command."""
    source = ROOT / "src"
    return sorted(
        name
        for name in names
        if not _TOP.match(name)
        or _STRANGE.search(name)
        # The rest of the wheel is machine code.
        or (
            name.startswith("backnorm/")
            and not (source / name).is_file()
            and not re.fullmatch(r"backnorm_kernels/lib/[^/]+/[^/]+\.so", name)
        )
    )


def names_of(requirements: Iterable[object]) -> set[str]:
    """Return the normalised names of packages in requirements; included groups are ignored."""
    texts = [text for text in requirements if isinstance(text, str)]
    return {re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", text)[0]).lower() for text in texts}


def unwanted() -> set[str]:
    """Return the packages that only extras or dependency groups for developers name."""
    project = PROJECT["project"]
    lists = [*project["optional-dependencies"].values(), *PROJECT["dependency-groups"].values()]
    wanted = names_of(project["dependencies"]) | {"backnorm"}
    return set().union(*map(names_of, lists)) - wanted


def supported() -> list[str]:
    """Return the versions of Python that the package supports."""
    versions = (
        re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line)
        for line in PROJECT["project"]["classifiers"]
    )
    return [match[1] for match in versions if match]


def interpreter(version: str) -> str | None:
    """Return a working Python of a version, from PATH or pyenv, or None."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(home.glob(f"versions/{version}.*/bin/python"))
    for path in (shutil.which(f"python{version}"), *map(str, found)):
        # pyenv has shims of versions that are not activated; these fail.
        if path and not _ran([path, "-c", "import venv"]).returncode:
            return path
    return None


def check(wheel: Path, python: str, folder: Path) -> str:
    """Install the wheel in a new environment, run the demo, and return a summary."""
    _run([python, "-m", "venv", str(folder)])
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt"), "--only-binary", ":all:"]
    _run([*pip, "install", "--quiet", *constraints, str(wheel)])
    listed = json.loads(_run([*pip, "list", "--format", "json"]))
    installed = {re.sub(r"[-_.]+", "-", entry["name"]).lower() for entry in listed}
    if strange := sorted(installed & unwanted()):
        sys.exit(f"the wheel installed unwanted packages: {', '.join(strange)}")
    demo = _run([str(folder / "bin" / "backnorm"), "demo"])
    _run([str(folder / "bin" / "backnorm"), "info"])
    others = sorted(installed - {"pip", "setuptools", "backnorm"})
    return f"{demo.splitlines()[0]}\n  installed with it: {', '.join(others)}"


def _ran(command: list[str]) -> subprocess.CompletedProcess[str]:
    # Run outside the checkout, so that the installed package is imported.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return subprocess.run(  # noqa: S603 (commands of ours)
        command, capture_output=True, text=True, cwd=tempfile.gettempdir(), env=environment
    )


def _run(command: list[str]) -> str:
    done = _ran(command)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def main() -> None:
    """Build and check; print a line for each step."""
    with tempfile.TemporaryDirectory() as scratch:
        begin = time.perf_counter()
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
        done = subprocess.run([*build, "--directory", scratch], cwd=ROOT)  # noqa: S603 (ours)
        if done.returncode:
            sys.exit("the wheel could not be built")
        (wheel,) = Path(scratch).glob("*.whl")
        names = zipfile.ZipFile(wheel).namelist()
        if strange := strangers(names):
            sys.exit(f"the wheel contains files that do not belong to it: {', '.join(strange)}")
        size, seconds = wheel.stat().st_size / 2**20, time.perf_counter() - begin
        print(f"{wheel.name}: {len(names)} files, {size:.1f} MiB, built in {seconds:.0f} s")
        checked = 0
        for version in supported():
            python = interpreter(version)
            if python is None:
                print(f"Python {version}: not on this machine")
                continue
            begin = time.perf_counter()
            last = check(wheel, python, Path(scratch, version))
            print(f"Python {version}, {time.perf_counter() - begin:.0f} s: {last}")
            checked += 1
        if not checked:
            sys.exit("no supported Python is on this machine")


if __name__ == "__main__":
    main()
