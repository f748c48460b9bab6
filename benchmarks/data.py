"""The arrays of a cell: cheap to make, and with values that make no term of a result small."""

from __future__ import annotations

import functools
import math

import numpy as np

import backnorm
from backnorm.dtypes import ELEMENT_TYPES, FLOAT32, is_16_bit
from benchmarks.cells import Cell
from benchmarks.peers.base import Data

__all__ = ["EPSILON", "element_dtype", "make_data"]

#: Added to every variance.
EPSILON = 1e-5

# The number of different values, which large arrays repeat; a prime, so that channels differ.
_POOL = 1_000_003

# Every array begins at a cache line, like arrays of the frameworks.
_ALIGNMENT = 64


def element_dtype(name: str) -> np.dtype:
    """Return the element type of this name, which may be bfloat16."""
    return next(dtype for dtype in ELEMENT_TYPES if str(dtype) == name)


def make_data(cell: Cell) -> Data:
    """Return the arrays of a cell; they do not depend on its operation.

    x is normal with mean and deviation 1; dy is correlated with x and has mean 0.5.
    """
    dtype = element_dtype(cell.dtype)
    statistics = FLOAT32 if is_16_bit(dtype) else dtype
    channels = cell.shape[1]
    shape = cell.shape
    if cell.layout == "NXC":
        shape = (shape[0], *shape[2:], channels)
    x, dy, out = (_aligned(shape, dtype) for _ in range(3))
    for array, pool in zip((x, dy), _pools(cell.dtype), strict=True):
        _repeat(array.reshape(-1), pool)
    rng = np.random.default_rng(channels)
    gamma = rng.uniform(0.5, 1.5, channels).astype(statistics)
    beta = rng.uniform(-1.0, 1.0, channels).astype(statistics)
    # Every contestant and the oracle get the same statistics.
    _, mean, variance = backnorm.batch_norm_forward(
        x, gamma, beta, epsilon=EPSILON, data_format=cell.layout, out=out
    )
    return Data(
        x=x,
        dy=dy,
        mean=mean,
        variance=variance,
        gamma=gamma,
        beta=beta,
        epsilon=EPSILON,
        data_format=cell.layout,
        out=out,
    )


@functools.lru_cache(maxsize=1)
def _pools(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(_POOL, dtype=np.float32) + 1
    dy = rng.standard_normal(_POOL, dtype=np.float32) + 0.5 * x
    return x.astype(element_dtype(dtype)), dy.astype(element_dtype(dtype))


def _repeat(array: np.ndarray, pool: np.ndarray) -> None:
    for start in range(0, array.size, pool.size):
        part = array[start : start + pool.size]
        part[:] = pool[: part.size]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    head = -memory.ctypes.data % _ALIGNMENT
    return memory[head : head + size].view(dtype).reshape(shape)
