"""The element types that backnorm supports, and their permitted combinations."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOAT64 = np.dtype(np.float64)
FLOAT32 = np.dtype(np.float32)
FLOAT16 = np.dtype(np.float16)
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

#: Element types of x, dy and dx, widest first.
ELEMENT_TYPES = (FLOAT64, FLOAT32, FLOAT16, BFLOAT16)


def element_type(dtype: np.dtype) -> np.dtype | None:
    """Return `dtype` in native byte order if it is a supported element type, else None."""
    native = dtype.newbyteorder("=") if not dtype.isnative else dtype
    for candidate in ELEMENT_TYPES:
        if native == candidate:
            return candidate
    return None


def is_16_bit(dtype: np.dtype) -> bool:
    """Whether `dtype` is float16 or bfloat16."""
    return dtype in (FLOAT16, BFLOAT16)


def statistics_types(dtype: np.dtype) -> tuple[np.dtype, ...]:
    """Return the types that mean, variance, gamma and beta may have if x is of type `dtype`."""
    return (dtype, FLOAT32) if is_16_bit(dtype) else (dtype,)


def rounded(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return `values` in `dtype`, rounded once; values that are too large become infinite.

    ml_dtypes would round a float64 first to float32 and then to bfloat16. So 1 + 2^-8 + 2^-40 would
    become 1, although 1 + 2^-7 is nearer.
    """
    if values.dtype == dtype:
        return values
    if values.dtype == FLOAT64 and dtype == BFLOAT16:
        # Round to odd: truncate, and set the last bit if any truncated bit was set. The result is
        # halfway between two 16-bit values only if the original value is. The result has 15
        # significant bits, so float32 holds it exactly, even where it is subnormal in bfloat16.
        bits = np.ascontiguousarray(values, FLOAT64).view(np.int64)
        last = 1 << 38
        kept = bits & -last
        values = np.where(bits == kept, bits, kept | last).view(FLOAT64).reshape(values.shape)
    with np.errstate(over="ignore"):
        return values.astype(dtype)
