"""Masks of a ReLU: bits that say where the derivative of y = relu(batch norm + residual) is 1.

relu(v) is v where v > 0, NaN where v is NaN, and 0 otherwise. A ceiling is a number of x's type
that bounds relu(v) from above. The derivative is 1 where 0 < y < ceiling, and 0 otherwise, also
where y is NaN. The backward pass needs y only for this derivative, so a mask replaces y. Bit i % 8
of byte i // 8 belongs to element i in the memory order of x.
"""

from __future__ import annotations

import numpy as np

from backnorm.layout import in_order, mask_size, memory_order, order_mark, restore


def counting(y: np.ndarray, ceiling: float | None = None) -> np.ndarray:
    """Return a boolean array that is True where the derivative of a ReLU is 1.

    y is the result of the ReLU.
    """
    # y is compared in float64, because ml_dtypes warns when it compares NaN.
    values = y.astype(np.float64)
    return values > 0 if ceiling is None else (values > 0) & (values < ceiling)


def unpack_mask(mask: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return a mask, whose bits are in the memory order of x, as booleans in x's shape."""
    order = memory_order(x)
    bits = np.unpackbits(mask, count=x.size, bitorder="little").astype(bool)
    return restore(bits.reshape([x.shape[axis] for axis in order]), order)


def pack_mask(positive: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Pack booleans in x's shape into a mask, whose last bytes store the memory order of x."""
    order = memory_order(x)
    mask = np.zeros(mask_size(x.size), np.uint8)
    packed = np.packbits(in_order(positive, order, np.dtype(bool)).ravel(), bitorder="little")
    mask[: packed.size] = packed
    mark = order_mark(x.shape, order)
    mask[-len(mark) :] = np.frombuffer(mark, np.uint8)
    return mask


def masked(dy: np.ndarray, mask: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return dy where the mask is set, and 0 elsewhere."""
    return np.where(unpack_mask(mask, x), dy, np.zeros((), dy.dtype))
