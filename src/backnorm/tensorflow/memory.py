"""Tensors as NumPy arrays and back: the same memory wherever TensorFlow allows it.

With TensorFlow 2.21 on a CPU: ``numpy.asarray(tensor)`` is a view for every type
(``tensor.numpy()`` is a copy), ``tf.constant(array)`` and ``tf.convert_to_tensor(array)`` copy, and
``tf.experimental.dlpack.from_dlpack`` does not. But operators of TensorFlow end the process
("Check failed: IsAligned()") if a tensor does not begin at a multiple of 64 bytes, which
``from_dlpack`` does not check. So results are allocated at such addresses, and an array at another
address is copied.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from backnorm.allocation import allocate
from backnorm.dtypes import BFLOAT16

__all__ = ["as_array", "as_tensor", "empty"]

# EIGEN_MAX_ALIGN_BYTES of a build for the widest vectors; narrower builds need less.
_ALIGNMENT = 64


def as_array(tensor: Any) -> np.ndarray:
    """Return an eager tensor's elements, without copying those of a CPU's."""
    return np.asarray(tensor)


def as_tensor(array: np.ndarray) -> Any:
    """Return an array as an eager tensor: its own memory if that is aligned, else a copy.

    The array must not be written to afterwards.
    """
    if not (array.flags.c_contiguous and _aligned(array)):
        source, array = array, empty(array.shape, array.dtype)
        array[...] = source
    if array.dtype == BFLOAT16:  # NumPy's DLPack knows no bfloat16
        return tf.bitcast(_shared(array.view(np.uint16)), tf.bfloat16)
    return _shared(array)


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return a new C-contiguous array that TensorFlow takes without a copy."""
    array = allocate(shape, dtype)
    if _aligned(array):
        return array
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _aligned(array: np.ndarray) -> bool:
    # ctypes.data would cost another microsecond.
    address: int = array.__array_interface__["data"][0]
    return address % _ALIGNMENT == 0


def _shared(array: np.ndarray) -> Any:
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
