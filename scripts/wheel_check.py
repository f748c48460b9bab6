"""Build both wheels, install them in a fresh environment of every Python, and run the demo.

    python scripts/wheel_check.py

`pyproject.toml` names the supported Pythons; those on PATH or in pyenv are used. In each, the demo
runs with the wheel of backnorm alone, and then with that of backnorm-kernels beside it. The wheels
must contain only the libraries and the command. They must not install a framework, a compiler, or a
package that only tests, benchmarks, examples or the documentation need. The first failure ends the
script with status 1. BACKNORM_BUILD_LEVELS selects the levels of processors that the kernels are
built for.
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

#: The folder of each distribution, and its package.
DISTRIBUTIONS = {"backnorm": ROOT, "backnorm_kernels": ROOT / "kernels"}

_TOP = re.compile(
    r"backnorm/|backnorm-[^/]+\.dist-info/"
    r"|backnorm_kernels/|backnorm_kernels-[^/]+\.dist-info/"
)
# Parts of paths that must not be in the wheel.
_STRANGE = re.compile(
    r"(^|/)(tests?|test_[^/]*|check_[^/]*|conftest\.py|bench[^/]*|examples?|training|docs?)(/|$)"
)


def strangers(names: Iterable[str]) -> list[str]:
    """Return the files of a wheel that belong neither to a library nor to the command."""
    return sorted(
        name
        for name in names
        if not _TOP.match(name)
        or _STRANGE.search(name)
        # The rest of the wheel is machine code.
        or (
            (package := name.partition("/")[0]) in DISTRIBUTIONS
            and not (DISTRIBUTIONS[package] / "src" / name).is_file()
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
    wanted = names_of(project["dependencies"]) | {"backnorm", "backnorm-kernels"}
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


def check(wheels: Iterable[Path], python: str, folder: Path) -> str:
    """Install the wheels in a new environment, one after the other, run the demo with each, and
    return a summary.
    """
    _run([python, "-m", "venv", str(folder)])
    inside = str(folder / "bin" / "python")
    pip = [inside, "-m", "pip", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt"), "--only-binary", ":all:"]
    demos = []
    for wheel in wheels:
        _run([*pip, "install", "--quiet", *constraints, str(wheel)])
        demos.append(_run([str(folder / "bin" / "backnorm"), "demo"]).splitlines()[0])
        _run([str(folder / "bin" / "backnorm"), "info"])
    listed = json.loads(_run([*pip, "list", "--format", "json"]))
    installed = {re.sub(r"[-_.]+", "-", entry["name"]).lower() for entry in listed}
    if strange := sorted(installed & unwanted()):
        sys.exit(f"the wheels installed unwanted packages: {', '.join(strange)}")
    others = sorted(installed - {"pip", "setuptools", "backnorm", "backnorm-kernels"})
    return "\n  ".join(["", *demos, f"installed with them: {', '.join(others)}"])


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


def _built(root: Path, folder: Path) -> Path:
    """Build the wheel of a distribution, check its files, and return its path."""
    begin = time.perf_counter()
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    done = subprocess.run([*build, "--directory", str(folder)], cwd=root)  # noqa: S603 (ours)
    if done.returncode:
        sys.exit("the wheel could not be built")
    (wheel,) = folder.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    if strange := strangers(names):
        sys.exit(f"the wheel contains files that do not belong to it: {', '.join(strange)}")
    size, seconds = wheel.stat().st_size / 2**20, time.perf_counter() - begin
    print(f"{wheel.name}: {len(names)} files, {size:.1f} MiB, built in {seconds:.0f} s")
    return wheel


def main() -> None:
    """Build and check; print a line for each step."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels = [_built(root, Path(scratch, name)) for name, root in DISTRIBUTIONS.items()]
        pythons = {version: interpreter(version) for version in supported()}
        for version, python in pythons.items():
            if python is None:
                print(f"Python {version}: not on this machine")
                continue
            begin = time.perf_counter()
            last = check(wheels, python, Path(scratch, version))
            print(f"Python {version}, {time.perf_counter() - begin:.0f} s: {last}")
    if not any(pythons.values()):
        sys.exit("no supported Python is on this machine")


if __name__ == "__main__":
    main()
