"""The memory of tensors: element types, addresses, order of axes, masks.

New tensors are allocated by PyTorch, not by NumPy, because a tensor in the memory of a NumPy array
has two limits. It cannot be resized. If an autograd function returns a view of such a tensor, the
view cannot be changed in place, for example by a ReLU.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from backnorm.layout import Order, by_strides, mask_size
from backnorm.problem import Metadata, check_mask
from backnorm.torch.checks import TensorTypeError, TensorValueError
from backnorm.torch.dispatch import dispatch_keys, is_opaque

_TYPES = {
    torch.float64: np.dtype(np.float64),
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.uint8: np.dtype(np.uint8),
}
# Represents all element types that are not accepted.
_OTHER = np.dtype(object)


def element_type(dtype: torch.dtype) -> np.dtype:
    """Return NumPy's type for PyTorch's type `dtype`, or `object` if the type is not accepted."""
    return _TYPES.get(dtype, _OTHER)


def statistics_type(dtype: torch.dtype) -> torch.dtype:
    """Return the type of the mean and variance of an x of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def metadata(tensor: Tensor) -> Metadata:
    """Return a tensor's shape and type."""
    return Metadata(tuple(tensor.shape), element_type(tensor.dtype))


def wide_metadata(tensor: Tensor, x: Tensor) -> Metadata:
    """Return the shape and type that a per-channel tensor has after its conversion by `wide`."""
    shape, dtype = metadata(tensor)
    if tensor.dtype is x.dtype and tensor.dtype.itemsize == 2:
        dtype = np.dtype(np.float32)
    return Metadata(shape, dtype)


def plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory contains the values of its elements.

    The memory of a lazily negated tensor (`Tensor.is_neg`) contains the negated values, and a zero
    tensor may have no memory.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def dense(x: Tensor) -> Tensor:
    """Return x if it is `plain` and dense in some order of its axes, else a copy."""
    if plain(x) and (x.is_contiguous() or x.permute(order_of(x)).is_contiguous()):
        return x
    return x.detach().clone()


def order_of(x: Tensor) -> Order:
    """Return the order of axes in which x, or the copy that `dense` makes, is dense."""
    if x.is_contiguous():
        return tuple(range(x.dim()))
    order = by_strides(x.stride())
    if x.permute(order).is_contiguous():
        return order
    return by_strides(torch.empty_like(x, device="meta").stride())


def wide(tensor: Tensor, x: Tensor) -> Tensor:
    """Return the per-channel tensor `tensor` in a form that is contiguous and `plain`.

    If the tensor has the same type as x, and this type has 16 bits, the tensor is converted to
    float32.
    """
    if tensor.dtype.itemsize == 2 and tensor.dtype is x.dtype:
        return tensor.detach().float().contiguous()
    return contiguous(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """Return `tensor` if it is contiguous and `plain`, else a contiguous copy."""
    if tensor.is_contiguous() and plain(tensor):
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def check_memory(tensor: Tensor, name: str) -> int:
    """Return the address of a tensor's elements, or raise if they are not in memory.

    The length of the storage is not checked: reading the length creates a Python object for the
    storage, after which autograd no longer adds gradients in place.
    """
    if is_opaque(tensor):
        raise TensorTypeError(
            name,
            "has no elements in memory",
            came=f"{tensor.layout}, keys {dispatch_keys(tensor)}",
            accepted="a strided tensor",
        )
    address = tensor.data_ptr()
    if has_no_memory(tensor, address) and not tensor._is_zerotensor():
        raise TensorValueError(
            name,
            "has a non-zero number of elements, but its data is not allocated yet",
            came="a storage of 0 bytes",
            accepted=f"{tensor.nbytes} bytes or more",
        )
    return address


def has_no_memory(tensor: Tensor, address: int) -> bool:
    """Whether the storage of a tensor has been freed, or PyTorch treats the tensor as zeros."""
    # Such a storage begins at address 0, so the address of the tensor is its offset in bytes.
    return address == tensor.storage_offset() * tensor.itemsize and tensor.numel() > 0


def check_own_memory(tensor: Tensor, name: str) -> None:
    """Raise if elements of a per-channel tensor share memory.

    The tensor is updated in place, so each element must have memory of its own.
    """
    if tensor._is_zerotensor() or (tensor.numel() > 1 and 0 in tensor.stride()):
        raise TensorValueError(
            name,
            "must have separate memory for every element, because it is updated in place",
            accepted="a tensor that can be written to",
            hint=f"pass {name}.clone()",
        )


class _Memory:
    """An object that keeps a tensor alive: the base of an array that shares the tensor's memory.

    `Tensor.numpy` would also keep the tensor alive, but the tensor could then not be resized.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        address = check_memory(tensor, "tensor")
        self._tensor = tensor
        strides = None
        if not tensor.is_contiguous():
            strides = tuple(tensor.itemsize * step for step in tensor.stride())
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tensor.shape,
            "strides": strides,
            "typestr": element_type(tensor.dtype).str,
            "version": 3,
        }


def array_of(tensor: Tensor) -> np.ndarray:
    """Return an array in the memory of a tensor, or of a copy if the tensor is not `plain`.

    The caller must have checked the tensor's class and element type; this function does not check
    them.
    """
    if not plain(tensor):
        tensor = tensor.detach().clone()
    # The array interface describes bfloat16 as two bytes, because bfloat16 is not a NumPy type. So
    # `view` is needed to get an array of the right type.
    return np.asarray(_Memory(tensor)).view(element_type(tensor.dtype))


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a new tensor with an array's elements."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).clone()
    return torch.from_numpy(array).clone()


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return a forward pass's mask as booleans in x's order of axes; raise if the mask is invalid.

    The elements of x are not read.
    """
    check_mask(metadata(mask), mask_size(x.numel()))
    like = dense(torch.empty_strided(x.shape, x.stride(), device="meta"))
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits = (mask[:, None] >> shifts & 1).flatten()[: x.numel()].bool()
    return bits.as_strided(x.shape, like.stride())


def as_type(weight: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter in the parameter's type."""
    return gradient if weight is None else gradient.to(weight.dtype)


def inverse_deviation(variance: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(variance + eps) in float64, with the bits that the kernels compute.

    On a CPU, `torch.sqrt` is off by one unit in the last place for 0.7 % of all numbers (PyTorch
    2.13 with MKL), but `torch.rsqrt` divides 1 by the correctly rounded square root. On a GPU,
    `sqrt` is correctly rounded, and `rsqrt` is not.
    """
    total = variance.double() + eps
    return total.rsqrt() if total.is_cpu else 1.0 / total.sqrt()
