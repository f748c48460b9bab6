"""The wheels: pure Python, and machine code without anything that could make any."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
library = pytest.importorskip("backnorm_kernels.library", reason="kernels are not installed")
make = pytest.importorskip("backnorm_kernels.build.make")

RESULT = """
import sys
import numpy as np
import backnorm
from backnorm_kernels import library

x = np.arange(8 * 16 * 5, dtype=np.float32).reshape(8, 16, 5) % 37
mean, variance = x.mean((0, 2)), x.var((0, 2))
gamma = np.ones(16, np.float32)
gradients = backnorm.batch_norm_backward(x, x[::-1], mean, variance, gamma, epsilon=1e-5)
print(library.FOLDER, library.level(), *(part.tobytes().hex() for part in gradients))
assert not {"numba", "llvmlite"} & set(sys.modules)
"""


def _built(root, folder):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder],
        cwd=root,
        env={**os.environ, "BACKNORM_BUILD_LEVELS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def pure(tmp_path_factory):
    return _built(ROOT, tmp_path_factory.mktemp("pure"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    if make.missing(make.of_this_processor(), library.FOLDER):
        pytest.skip("not all libraries are built: make kernels")
    return _built(ROOT / "kernels", tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def unpacked(pure, wheel, tmp_path):
    """Return a function that unpacks both wheels, but not the files that it is told to leave."""

    def folder(leave=""):
        for each in (pure, wheel):
            with zipfile.ZipFile(each) as archive:
                names = [n for n in archive.namelist() if not (leave and leave in n)]
                archive.extractall(tmp_path, names)
        return tmp_path

    return folder


def _answers(folder, *others):
    done = subprocess.run(
        [sys.executable, "-c", RESULT],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *others)))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    where, *rest = done.stdout.split()
    assert Path(where).is_relative_to(folder)
    return rest


def test_wheel_without_kernels_serves_every_platform_and_contains_no_kernels(pure, wheel_check):
    assert pure.stem.split("-")[2:] == ["py3", "none", "any"]
    with zipfile.ZipFile(pure) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "backnorm",
        pure.stem.rsplit("-", 3)[0] + ".dist-info",
    }
    assert wheel_check.strangers(names) == []


def test_wheel_has_tags_of_all_pythons_and_one_platform(wheel):
    tags = wheel.stem.split("-")[2:]
    assert tags[:2] == ["py3", "none"]
    assert "any" not in tags[2]
    assert "manylinux" not in tags[2], "it serves some processors of the platform only"


def test_wheel_contains_libraries_of_current_sources_and_no_build_code(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    folder = "backnorm_kernels/lib/"
    wanted = {
        f"{folder}{level}/{name}-{library.digest(name)}.so"
        for level, name in make.of_this_processor()
    }
    assert {name for name in names if name.startswith(folder)} == wanted
    assert not [name for name in names if name.startswith(("backnorm_kernels/build", "hatch"))]
    assert not [name for name in names if name.startswith("backnorm_kernels/kernels")]


@pytest.fixture(scope="module")
def wheel_check():
    spec = importlib.util.spec_from_file_location("wheel_check", ROOT / "scripts/wheel_check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wheel_of_kernels_contains_only_its_package(wheel, wheel_check):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names} == {
        "backnorm_kernels",
        wheel.stem.rsplit("-", 3)[0] + ".dist-info",
    }
    assert wheel_check.strangers(names) == []


@pytest.mark.parametrize(
    "name",
    [
        "tests/test_wheel.py",
        "examples/quickstart.ipynb",
        "benchmarks/__init__.py",
        "backnorm/bench/worker.py",
        "backnorm_kernels/kernels/tests/__init__.py",
        "backnorm/left_over.py",
        "backnorm_kernels/lib/x86-64/_backward.o",
    ],
)
def test_strangers_returns_file_that_is_not_part_of_wheel(name, wheel_check):
    assert wheel_check.strangers(["backnorm/__init__.py", name]) == [name]


def test_unwanted_lists_packages_of_extras_and_no_dependencies(wheel_check):
    unwanted = wheel_check.unwanted()
    assert unwanted >= {"torch", "jax", "tensorflow-cpu", "numba", "pytest", "scikit-learn"}
    assert not unwanted & {"numpy", "ml-dtypes", "array-api-compat", "typer", "rich", "safetensors"}
    assert wheel_check.supported()[:3] == ["3.11", "3.12", "3.13"]


def test_unpacked_wheels_compute_same_bits_without_compiler(unpacked):
    assert _answers(unpacked()) == _answers(ROOT / "kernels" / "src", ROOT / "src")


def test_wheel_without_libraries_raises_error_with_instructions(unpacked):
    done = subprocess.run(
        [sys.executable, "-c", RESULT],
        env={**os.environ, "PYTHONPATH": str(unpacked(leave="/lib/"))},
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("backnorm.errors.MachineCodeError: ")
    assert "BACKNORM_BUILD_LEVELS=all" in last


def test_build_of_kernels_imports_nothing_of_backnorm():
    code = """
import sys
from backnorm_kernels.build import compile, make
from backnorm_kernels.kernels import columns, segments, team, xla_handler
assert not [name for name in sys.modules if name.partition(".")[0] == "backnorm"]
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "kernels" / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_build_with_unknown_level_fails(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", tmp_path],
        cwd=ROOT / "kernels",
        env={**os.environ, "BACKNORM_BUILD_LEVELS": "x86-64-v9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "BACKNORM_BUILD_LEVELS" in done.stdout + done.stderr
    assert not list(tmp_path.iterdir())


def test_metadata_prepared_by_pip_does_not_run_the_hook(tmp_path):
    call = "import sys, hatch_build; hatch_build.prepare_metadata_for_build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", call, tmp_path],
        cwd=ROOT / "kernels",
        # As pip sets it; the hook raises an error for a level that does not exist.
        env={**os.environ, "PIP_BUILD_TRACKER": "", "BACKNORM_BUILD_LEVELS": "x86-64-v9"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (metadata,) = tmp_path.glob("*/*")
    assert metadata.name == "METADATA"
    assert "\nName: backnorm-kernels\n" in metadata.read_text(encoding="utf-8")
