"""Tensors and their memory: which can be read as it is, arrays on it, and new ones.

New tensors are on memory of PyTorch's own. On an array's memory they could not be resized, and as
views of another tensor not be changed in place behind a function of autograd's (a ReLU does that).
"""

from __future__ import annotations

import functools
from typing import TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from backnorm.layout import Order, by_strides
from backnorm.torch.reuse import empty_like

__all__ = [
    "array_of",
    "as_type",
    "dense",
    "laid_out_as",
    "order_of",
    "plain",
    "tensor_of",
    "wide",
]

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


class _Memory:
    """What an array on a tensor's memory is based on. It keeps the tensor.

    `Tensor.numpy` would too, but after it the tensor's memory cannot be resized any more.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        here = tensor.is_cpu and tensor.layout is torch.strided
        address = tensor.data_ptr() if here else 0
        if not address and tensor.numel():
            tensor.detach().numpy()  # says why not
        self._tensor = tensor
        strides = None
        if not tensor.is_contiguous():
            strides = tuple(tensor.itemsize * step for step in tensor.stride())
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tensor.shape,
            "strides": strides,
            "typestr": _typestr(tensor.dtype),
            "version": 3,
        }


@functools.cache
def _typestr(dtype: torch.dtype) -> str:
    # NumPy has no bfloat16: over as integers.
    like = torch.empty(0, dtype=torch.int16 if dtype is torch.bfloat16 else dtype)
    return like.numpy().dtype.str


def array_of(tensor: Tensor) -> np.ndarray:
    """Return the tensor's memory as an array."""
    array = np.asarray(_Memory(tensor if plain(tensor) else tensor.detach().clone()))
    return array.view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else array


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a new tensor with an array's elements."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).clone()
    return torch.from_numpy(array).clone()


def laid_out_as(array: np.ndarray, x: Tensor) -> Tensor:
    """Return a new tensor with an array's elements that lies in memory as the dense x does."""
    tensor = empty_like(x)
    array_of(tensor)[...] = array
    return tensor


def as_type(weight: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter in the parameter's type."""
    return gradient if weight is None else gradient.to(weight.dtype)
