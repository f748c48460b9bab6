"""What the checks of all frameworks share, each in its own process; imports none of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

_EXAMPLES = Path(__file__).parents[2] / "examples"


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
