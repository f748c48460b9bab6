"""Effects of importing the package, and its public names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import backnorm
from backnorm.cli.info import describe

ROOT = Path(__file__).parent.parent
_INIT = "src/backnorm_kernels/__init__.py"


def test_import_loads_no_framework_compiler_or_command_line():
    code = """
import sys
import backnorm, backnorm.dialects, backnorm.reference
from backnorm.dialects import aten, ngraph, onednn_graph, onednn_spec, stablehlo, tensorflow
heavy = {"torch", "jax", "jaxlib", "tensorflow", "triton", "rich", "typer", "click", "mpmath"}
heavy |= {"safetensors", "pydantic"}
heavy |= {"numba", "llvmlite", "array_api_compat"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_calls_load_no_compiler():
    code = """
import sys
import numpy as np

import backnorm
from backnorm.cli.info import describe
x = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
backnorm.batch_norm_backward(x, x * x, x.mean((0, 2)), x.var((0, 2)), epsilon=1e-5)
backnorm.batch_norm_forward(x, epsilon=1e-5, activation="relu")
one = np.ones(3, np.float32)
backnorm.batch_norm_double_backward(x, x, one, one, ddx=x, epsilon=1e-5)
heavy = {"numba", "llvmlite", "backnorm_kernels.kernels", "array_api_compat"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_dunder_all_lists_public_names_with_docstrings():
    modules = {"config", "dtypes", "errors", "execute", "layout", "machine", "operators"}
    modules |= {"plan", "problem", "results", "threads"}
    offered = {name for name in vars(backnorm) if not name.startswith("_")}
    loaded = {name for name in offered if f"backnorm.{name}" in sys.modules}
    assert offered - loaded - modules == set(backnorm.__all__) - modules
    assert all(getattr(backnorm, name).__doc__ for name in backnorm.__all__)


def test_version_equals_version_of_distribution():
    assert metadata.version("backnorm") == backnorm.__version__


def required():
    """Return the required packages, each with its minimum version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return dict(line.split(";")[0].split(">=") for line in project["dependencies"])


def test_minimum_typer_accepts_literal_options():
    assert tuple(map(int, required()["typer"].split("."))) >= (0, 19)


def test_info_has_version_of_each_required_package():
    versions = describe()["versions"]
    assert all(versions[name] for name in required())


def test_required_dependencies_are_six_known_packages():
    assert {name.replace("-", "_") for name in required()} == {
        "numpy",
        "ml_dtypes",
        "array_api_compat",
        "typer",
        "rich",
        "safetensors",
    }


def test_build_of_backnorm_needs_no_compiler():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert [line.split(">")[0] for line in project["build-system"]["requires"]] == ["hatchling"]


def test_versions_of_both_distributions_are_equal():
    folder = ROOT / "kernels"
    version = re.search('__version__ = "(.*)"', (folder / _INIT).read_text())[1]
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert version == backnorm.__version__
    assert project["dependencies"] == [f"backnorm=={version}"]


def test_build_requirements_are_among_pins_of_constraints():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    kernels = tomllib.loads((ROOT / "kernels" / "pyproject.toml").read_text())
    pins = set((ROOT / "constraints.txt").read_text().split("\n"))
    exact = [line for line in kernels["build-system"]["requires"] if "==" in line]
    assert {line.split("==")[0] for line in exact} == {"numba", "llvmlite", "numpy"}
    assert pins >= set(exact)
    assert pins >= {line for line in project["dependency-groups"]["kernels"] if "==" in line}
