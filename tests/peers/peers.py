"""The other implementations: where they are, and how they are run (each in its own process)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

DRIVERS = Path(__file__).parent / "drivers"
NAMES = ("x", "dy", "mean", "variance", "gamma")


def is_installed(module):
    return importlib.util.find_spec(module) is not None


def onednn_library():
    """Return the path of the libdnnl.so.3 that the wheel onednn-cpu-gomp brings, or None."""
    try:
        distribution = importlib.metadata.distribution("onednn-cpu-gomp")
    except importlib.metadata.PackageNotFoundError:
        return None
    listed = [
        Path(str(distribution.locate_file(file)))
        for file in distribution.files or ()
        if file.name == "libdnnl.so.3"
    ]
    candidates = [*listed, Path(sys.prefix) / "lib" / "libdnnl.so.3"]
    return next((path.resolve() for path in candidates if path.exists()), None)


def run(driver, cases, folder, *arguments):
    """Return {case name: (dx, dgamma, dbeta)} as the peer computes them."""
    source, target = folder / "cases.npz", folder / "results.npz"
    described = [
        {"name": case.name, "training": case.training, **case.data.options} for case in cases
    ]
    arrays = {f"{case.name}/{name}": getattr(case.data, name) for case in cases for name in NAMES}
    np.savez(source, cases=json.dumps(described), **arrays)
    finished = subprocess.run(
        [sys.executable, DRIVERS / driver, source, target, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, f"{driver} failed:\n{finished.stderr[-4000:]}"
    with np.load(target) as results:
        return {
            case.name: tuple(results[f"{case.name}/{name}"] for name in ("dx", "dgamma", "dbeta"))
            for case in cases
        }
