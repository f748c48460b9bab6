"""Tensors and their memory: which can be read as it is, and arrays on it."""

from __future__ import annotations

from typing import TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from backnorm.allocation import LARGE, allocate
from backnorm.layout import Order, by_strides, memory_order

__all__ = [
    "array_of",
    "as_type",
    "dense",
    "empty_like",
    "laid_out_as",
    "order_of",
    "plain",
    "tensor_of",
    "wide",
]

_BYTE = np.dtype(np.uint8)
Kind = TypeVar("Kind", Tensor, None, Tensor | None)


def plain(tensor: Tensor) -> bool:
    """Whether the elements are in memory as they are.

    A tensor may be yet to be negated, or be all zero without any memory.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy if it is not dense in any order of its axes, or not `plain`."""
    if plain(x) and (x.is_contiguous() or x.permute(order_of(x)).is_contiguous()):
        return x
    return x.detach().clone()


def order_of(x: Tensor) -> Order:
    """Return the order of axes in which x is dense, or its own order if it is not."""
    natural = tuple(range(x.dim()))
    if x.is_contiguous():
        return natural
    order = by_strides(x.stride())
    return order if x.permute(order).is_contiguous() else natural


def wide(tensor: Kind, x: Tensor) -> Kind:
    """Return a per-channel tensor contiguous and `plain`, and of 16 bits as x is as float32."""
    if tensor is None:
        return None
    if tensor.dtype.itemsize == 2 and tensor.dtype is x.dtype:
        return tensor.detach().float().contiguous()
    if tensor.is_contiguous() and plain(tensor):
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def array_of(tensor: Tensor) -> np.ndarray:
    """Return the tensor's memory as an array."""
    tensor = tensor.detach()
    if not plain(tensor):
        tensor = tensor.clone()
    if tensor.dtype is torch.bfloat16:
        # NumPy has no such type: over as integers.
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a tensor on the array's memory."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def empty_like(x: Tensor) -> Tensor:
    """Return a new tensor that lies in memory as the dense x does.

    A large one is on memory of tensors that are gone: see `backnorm.allocation`.
    """
    size = x.numel() * x.itemsize
    if size < LARGE:
        return torch.empty_like(x)
    return _on(allocate((size,), _BYTE), x)


def laid_out_as(array: np.ndarray, x: Tensor) -> Tensor:
    """Return a tensor on the memory of an array that lies as x does, with x's strides.

    The strides of axes of size 1 mean nothing to NumPy. To PyTorch they tell channels_last from
    contiguous.
    """
    memory = array.transpose(memory_order(array))
    return _on(memory.reshape(-1).view(np.uint8), x)


def _on(memory: np.ndarray, x: Tensor) -> Tensor:
    """Return a tensor on bytes that lies as x does.

    It must not be a view of another tensor: autograd refuses to let the output of a function that
    is one be changed in place, as a ReLU behind the layer does.
    """
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, x.stride())


def as_type(weight: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter in the parameter's type."""
    return gradient if weight is None else gradient.to(weight.dtype)
