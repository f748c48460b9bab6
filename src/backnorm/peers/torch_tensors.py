"""PyTorch's tensors from NumPy's arrays and back, bfloat16 included."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from backnorm.dtypes import BFLOAT16, element_type


def to_tensor(array: np.ndarray) -> Any:
    """Return an array as a tensor on the CPU, which has the array's memory and strides."""
    import torch

    if element_type(array.dtype) == BFLOAT16:
        # PyTorch does not read NumPy's bfloat16.
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(tensor: Any) -> np.ndarray:
    """Return a tensor of any device as an array, without the tensor's derivative."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        bits: np.ndarray = tensor.view(sys.modules["torch"].int16).numpy()
        return bits.view(BFLOAT16)
    return np.asarray(tensor.numpy())
