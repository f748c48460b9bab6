"""What importing the package does, and what it offers."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import backnorm


def test_importing_loads_no_framework_and_no_command_line():
    code = """
import sys
import backnorm, backnorm.dialects, backnorm.reference
from backnorm.dialects import aten, ngraph, onednn_graph, onednn_spec, stablehlo, tensorflow
heavy = {"torch", "jax", "jaxlib", "tensorflow", "triton", "rich", "typer", "click", "mpmath"}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_all_is_the_public_interface():
    modules = {"config", "dtypes", "errors", "execute", "kernels", "layout", "machine", "operators"}
    modules |= {"plan", "problem", "results", "threads"}
    offered = {name for name in vars(backnorm) if not name.startswith("_")}
    loaded = {name for name in offered if f"backnorm.{name}" in sys.modules}
    assert offered - loaded - modules == set(backnorm.__all__) - modules
    assert all(getattr(backnorm, name).__doc__ for name in backnorm.__all__)


def test_the_version_is_the_distribution_s():
    assert metadata.version("backnorm") == backnorm.__version__


def test_hard_dependencies_are_few():
    required = [
        line.split(";")[0] for line in metadata.requires("backnorm") or () if "extra ==" not in line
    ]
    names = {
        "".join(c if c.isalnum() or c in "_-" else " " for c in line).split()[0]
        for line in required
    }
    assert {name.replace("-", "_") for name in names} == {
        "numpy",
        "ml_dtypes",
        "numba",
        "typer",
        "rich",
    }
