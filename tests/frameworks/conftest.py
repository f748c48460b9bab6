"""Fixtures of the tests of all frameworks; this module imports no framework.

Each folder here is a run of pytest of its own in the Makefile (`make test-torch`), and Keras's one
for each of its backends: no two frameworks share a process. Where they do, in an editor or in plain
`pytest`, all are found, but those of Triton's kernels are skipped: it interprets, or it compiles.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.support import required

_EXAMPLES = Path(__file__).parents[2] / "examples"

# What the tests of each folder import.
_NEEDS = {
    "torch": ("torch",),
    "jax": ("jax",),
    "tensorflow": ("tensorflow",),
    "keras": ("keras",),
    "gpu": ("torch", "triton"),
    "gpu_code": ("triton",),
    "gpu_device": ("torch", "triton"),
}


# Triton decides when it is imported whether it interprets.
_ALONE = {"gpu", "gpu_code"}


def pytest_collection_modifyitems(items):
    """Skip what must have a process of its own and has not."""
    folders = {item: _folder(item.path) for item in items}
    if len(set(folders.values()) - {None, "gpu_device"}) < 2:
        return
    for item, folder in folders.items():
        if folder in _ALONE:
            reason = f"wants a process of its own: make test-{folder}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _folder(path):
    """Return the folder of a test beside this file, None for tests of no framework."""
    inside = Path(__file__).parent in path.parents
    return path.relative_to(Path(__file__).parent).parts[0] if inside else None


def pytest_ignore_collect(collection_path):
    """Leave out the tests of what is not installed; fail where nothing may be missing."""
    if collection_path.parent != Path(__file__).parent:
        return None
    needs = _NEEDS.get(collection_path.name, ())
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    if required.ALL:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}")
    return True


@pytest.fixture(scope="session")
def example():
    """Import an example, by name; without scikit-learn, skip."""
    pytest.importorskip("sklearn")

    def load(name):
        spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def assert_as_exact():
    """Require gradients of ours to be as near the exact ones as those of the framework's layers.

    What the rest of a network rounds is the same for both and has its bounds nowhere, so the
    framework's own layers are the measure: four times their worst error, and 256 units of the
    type for where they are exact themselves.
    """

    def check(ours, own, dtype):
        # So that NaN fails.
        assert ours <= 4 * own + 256 * float(np.finfo(dtype).eps)

    return check


@pytest.fixture
def rows(capsys):
    """Return the rows of the table that was printed: numbers of the own layers and of ours."""

    def read():
        lines = [line.split("│")[1:4] for line in capsys.readouterr().out.splitlines()]
        cells = [[cell.strip() for cell in line] for line in lines if len(line) == 3]
        return {name: [float(value.rstrip("%")) for value in values] for name, *values in cells}

    return read


@pytest.fixture
def assert_one_epoch(assert_as_exact):
    """Require what an example prints after one epoch to be what it has to be."""

    def check(found):
        first, first_of_ours = found["first loss"]
        assert first_of_ours == pytest.approx(first, rel=1e-6)
        own, ours = found["error of its gradients"]
        assert_as_exact(ours, own, "float32")
        # An activation near 0 that rounding moves across it may part the networks a little.
        own, ours = found["loss of epoch 1"]
        assert ours == pytest.approx(own, rel=0.05)
        assert ours < 0.5 * first, "it learns"
        own, ours = found["test accuracy"]
        assert ours == pytest.approx(own, abs=3)
        assert ours > 60, "with running statistics"

    return check
