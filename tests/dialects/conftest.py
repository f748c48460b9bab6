from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

Batch = dict[str, np.ndarray]

DTYPES = {
    "f64": np.dtype("float64"),
    "f32": np.dtype("float32"),
    "f16": np.dtype("float16"),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}


@pytest.fixture
def dtypes() -> dict[str, np.dtype]:
    return DTYPES


@pytest.fixture
def batch() -> Callable[..., Batch]:
    """Random inputs by their canonical names, with the batch's own statistics."""

    def make(
        shape: tuple[int, ...] = (4, 5, 5, 3),
        layout: str = "NXC",
        dtype: str = "f32",
        channel: str | None = None,
        seed: int = 0,
    ) -> Batch:
        rng = np.random.default_rng(seed)
        axis = 1 if layout == "NCX" else len(shape) - 1
        others = tuple(i for i in range(len(shape)) if i != axis)
        channel_type = DTYPES[channel or dtype]
        c = (shape[axis],)
        x = (rng.normal(size=shape) * 3 + 1).astype(DTYPES[dtype])
        wide = x.astype(np.float64)
        if x.size:
            mean, variance = wide.mean(others), wide.var(others)
        else:
            mean, variance = rng.normal(size=c), rng.uniform(0.5, 2, size=c)
        return {
            "x": x,
            "dy": rng.normal(size=shape).astype(DTYPES[dtype]),
            "mean": mean.astype(channel_type),
            "variance": variance.astype(channel_type),
            "gamma": rng.normal(size=c).astype(channel_type),
            "beta": rng.normal(size=c).astype(channel_type),
        }

    return make
