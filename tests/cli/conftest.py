from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from backnorm.cli.app import app as command

EPSILON = 1e-5


@pytest.fixture
def app():
    """Return the command that `cli` runs."""
    return command


@pytest.fixture
def write_json(tmp_path):
    def write(value, name="program.json"):
        path = tmp_path / name
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return write


@pytest.fixture
def tensors(rng):
    """A backward problem, float32, channels first: (6, 5, 4, 3)."""
    x = rng.normal(2.0, 3.0, (6, 5, 4, 3)).astype(np.float32)
    return {
        "x": x,
        "dy": rng.normal(size=x.shape).astype(np.float32),
        "mean": x.mean((0, 2, 3)),
        "variance": x.var((0, 2, 3)),
        "gamma": rng.uniform(0.5, 1.5, 5).astype(np.float32),
    }


@pytest.fixture
def npz(tmp_path, tensors) -> Path:
    path = tmp_path / "in.npz"
    np.savez(path, **tensors)
    return path


@pytest.fixture
def call():
    """A call on the fixture `tensors`; keyword arguments replace its entries."""

    def make(**changes):
        return {
            "dialect": "onednn_graph",
            "op": "BatchNormTrainingBackward",
            "attributes": {"epsilon": EPSILON, "data_format": "NCX"},
            "inputs": {
                "src": "x",
                "diff_dst": "dy",
                "mean": "mean",
                "variance": "variance",
                "gamma": "gamma",
            },
        } | changes

    return make


@pytest.fixture
def read_npz():
    """Read all arrays of a .npz file with NumPy itself."""

    def read(path):
        with np.load(path, allow_pickle=False) as file:
            return dict(file)

    return read
