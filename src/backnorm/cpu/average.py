"""Running statistics as machine code computes them: see `kernels.average`."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from backnorm.cpu import library
from backnorm.cpu.addresses import HEADER
from backnorm.cpu.kinds import THREADS
from backnorm.dtypes import FLOAT32, FLOAT64

__all__ = ["averages"]

_pack = struct.Struct("9n3d").pack

# Bits of `flags.num`: contiguous in C order, and aligned.
_PLAIN = 0x0101

_Pair = tuple[np.ndarray, np.ndarray]


def averages(old: _Pair, new: _Pair, weight: float, scale: float) -> _Pair | None:
    """Return (1 - weight) * old + weight * scale * new of mean and variance, in float32.

    Each is rounded once; scale is the variance's alone, and scale * new is rounded to new's type
    before. With weight 1 the old value is not looked at, and the other way round with weight 0.

    Parameters
    ----------
    old : (array, array)
        Mean and variance.
    new : (array, array)
        Those of the batch: dense arrays of one type.
    weight, scale : float

    Returns
    -------
    (float32 array, float32 array), or None
        None for arrays that machine code does not take: of other types than float32 (new: and
        float64), of other shapes than new, or not plain.
    """
    (mean, variance), (batch_mean, batch_variance) = old, new
    dtype, shape = batch_mean.dtype, batch_mean.shape
    if not (
        HEADER > 0
        and type(mean) is type(variance) is np.ndarray
        and mean.dtype is variance.dtype is FLOAT32
        and (dtype is FLOAT32 or dtype is FLOAT64)
        and mean.shape == variance.shape == shape
        and mean.flags.num & variance.flags.num & _PLAIN == _PLAIN
    ):
        return None
    found = np.empty(shape, FLOAT32), np.empty(shape, FLOAT32)
    of_mean = id(mean), id(batch_mean), id(found[0])
    of_variance = id(variance), id(batch_variance), id(found[1])
    wide = dtype is FLOAT64
    given = HEADER, mean.size, wide, *of_mean, *of_variance, scale, 1.0 - weight, weight
    _function()(_pack(*given))
    return found


@functools.cache
def _function() -> Callable[[bytes], Any]:
    found = library.load(THREADS).bn_average
    found.argtypes, found.restype = (ctypes.c_char_p,), ctypes.c_int64
    return found
