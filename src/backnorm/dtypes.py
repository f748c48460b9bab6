"""The element types backnorm computes with, and which may stand together."""

from __future__ import annotations

import ml_dtypes
import numpy as np

__all__ = [
    "BFLOAT16",
    "ELEMENT_TYPES",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "element_type",
    "is_16_bit",
    "statistics_types",
]

FLOAT64 = np.dtype(np.float64)
FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: Element types of x, dy and dx, widest first.
ELEMENT_TYPES = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)


def element_type(dtype: np.dtype) -> np.dtype | None:
    """Return the supported native-endian type that `dtype` stands for, or None."""
    native = dtype.newbyteorder("=") if not dtype.isnative else dtype
    for candidate in ELEMENT_TYPES:
        if native == candidate:
            return candidate
    return None


def is_16_bit(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or bfloat16."""
    return dtype in (FLOAT16, BFLOAT16)


def statistics_types(dtype: np.dtype) -> tuple[np.dtype, ...]:
    """Types that mean, variance, gamma and beta may have beside an `x` of type `dtype`."""
    return (dtype, FLOAT32) if is_16_bit(dtype) else (dtype,)
