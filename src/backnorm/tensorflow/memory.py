"""Convert tensors to NumPy arrays and back, sharing memory if TensorFlow allows it.

With TensorFlow 2.21 on a CPU, ``numpy.asarray(tensor)`` returns a view for every element type
(``tensor.numpy()`` returns a copy). ``tf.constant(array)`` and ``tf.convert_to_tensor(array)`` copy
the array; ``tf.experimental.dlpack.from_dlpack`` shares its memory. But TensorFlow's operators end
the process ("Check failed: IsAligned()") if the address of a tensor is not a multiple of 64 bytes,
and ``from_dlpack`` does not check the address. So results are allocated at multiples of 64 bytes,
and an array at another address is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from backnorm.allocation import aligned, is_aligned
from backnorm.dtypes import BFLOAT16


def as_tensor(array: np.ndarray) -> Any:
    """Return an eager tensor with the elements of an array.

    If the array is contiguous and aligned, the tensor shares the array's memory.
    The array must not be written to afterwards.
    """
    if not (array.flags.c_contiguous and is_aligned(array)):
        source, array = array, aligned(array.shape, array.dtype)
        array[...] = source
    if array.dtype == BFLOAT16:  # NumPy's DLPack does not support bfloat16
        return tf.bitcast(_shared(array.view(np.uint16)), tf.bfloat16)
    return _shared(array)


def _shared(array: np.ndarray) -> Any:
    return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
