"""Shape and type of tensors, as `backnorm.problem` looks at them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from backnorm.problem import Metadata

__all__ = ["element_type", "metadata", "wide_metadata"]

_TYPES = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.uint8: np.dtype(np.uint8),
}
# Whatever is not accepted.
_OTHER = np.dtype(object)


def element_type(dtype: torch.dtype) -> np.dtype:
    """Return the type of elements as NumPy's."""
    return _TYPES.get(dtype, _OTHER)


def metadata(tensor: Tensor) -> Any:
    """Return a tensor's shape and type."""
    return Metadata(tuple(tensor.shape), element_type(tensor.dtype))


def wide_metadata(tensor: Tensor | None, x: Tensor) -> Any:
    """Return a per-channel tensor's shape and type: float32 if it has 16 bits, as x has."""
    if tensor is None:
        return None
    shape, dtype = metadata(tensor)
    if tensor.dtype is x.dtype and tensor.dtype.itemsize == 2:
        dtype = np.dtype(np.float32)
    return Metadata(shape, dtype)
