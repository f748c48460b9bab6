"""Tensors and their memory: which can be read in place, as arrays, and new tensors.

New tensors are allocated by PyTorch. In an array's memory they could not be resized, and as views
of another tensor they could not be changed in place after an autograd function, as by a ReLU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from backnorm.allocation import LARGE, advise
from backnorm.layout import Order, by_strides
from backnorm.torch.checks import TensorTypeError, TensorValueError
from backnorm.torch.classes import OpaqueTensorError, dispatch_keys, in_memory, is_opaque

__all__ = [
    "array_of",
    "as_type",
    "check_before_pytorch",
    "check_memory",
    "check_moved",
    "check_own_memory",
    "contiguous",
    "dense",
    "empty_like",
    "in_order",
    "is_beyond",
    "order_in_memory",
    "order_of",
    "plain",
    "storage_of",
    "tensor_of",
    "users_of",
    "wide",
]

Kind = TypeVar("Kind", Tensor, None, Tensor | None)

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrapped = torch._C._functorch.get_unwrapped


def plain(tensor: Tensor) -> bool:
    """Whether memory holds the values of the elements.

    That of a lazily negated tensor does not (`Tensor.is_neg`), and a zero tensor may have none.
    """
    return not (tensor.is_neg() or tensor._is_zerotensor())


def dense(x: Tensor) -> Tensor:
    """Return x, or a copy if it is not dense in any order of its axes, or not `plain`."""
    if plain(x) and (x.is_contiguous() or x.permute(order_of(x)).is_contiguous()):
        return x
    return x.detach().clone()


def empty_like(x: Tensor) -> Tensor:
    """Return a new tensor of PyTorch's allocator with the strides of the dense x.

    Large memory is requested in huge pages: writing to 51 MB of new memory took 23 ms in pages of
    4 KiB and 12 ms in pages of 2 MiB (one thread, Intel Xeon).
    """
    tensor = torch.empty_like(x)
    if tensor.nbytes >= LARGE:
        advise(tensor.data_ptr(), tensor.nbytes)
    return tensor


def order_of(x: Tensor) -> Order:
    """Return the order of axes in which x is dense, or a copy of it is."""
    if x.is_contiguous():
        return tuple(range(x.dim()))
    order = by_strides(x.stride())
    if x.permute(order).is_contiguous():
        return order
    return by_strides(torch.empty_like(x, device="meta").stride())


@functools.lru_cache(maxsize=256)
def order_in_memory(strides: tuple[int, ...]) -> Tensor:
    """Return strides as a tensor: what a mask of a ReLU is saved with.

    The bits of a mask are in the order of x in memory. Hooks of saved tensors keep values, and may
    return x in another order.
    """
    return torch.tensor(strides, device="cpu")


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """Return x if it has the strides of `order`, else a copy that is dense in that order."""
    strides = tuple(order.tolist())
    if x.stride() == strides:
        return x
    axes = order_of(torch.empty_strided(x.shape, strides, device="meta"))
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    return x.permute(axes).contiguous().permute(inverse)


def wide(tensor: Kind, x: Tensor) -> Kind:
    """Return a per-channel tensor contiguous and `plain`, and of 16 bits as x is as float32."""
    if tensor is None:
        return None
    if tensor.dtype.itemsize == 2 and tensor.dtype is x.dtype:
        return tensor.detach().float().contiguous()
    return contiguous(tensor)


def contiguous(tensor: Tensor) -> Tensor:
    """Return a tensor that is contiguous and `plain`: itself, or a copy."""
    if tensor.is_contiguous() and plain(tensor):
        return tensor
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def check_memory(tensor: Tensor, name: str) -> int:
    """Return where the elements of a tensor are, or raise if they are not all in memory."""
    if is_opaque(tensor):
        raise OpaqueTensorError(
            name,
            "has no elements in memory of its own",
            came=f"{tensor.layout}, keys {dispatch_keys(tensor)}",
            accepted="a strided tensor",
        )
    if tensor._is_zerotensor():
        return 0
    address = tensor.data_ptr()
    if address and users_of(storage_of(tensor)) == 1 and not tensor.storage_offset():
        return address
    # What takes elements away resizes the storage, and leaves the tensor as it is.
    has, needs = tensor.untyped_storage().nbytes(), _bytes_to_the_end(tensor)
    if has < needs:
        problem = "has a non-zero number of elements, but its data is not allocated yet"
        if has:
            problem = (
                f"sizes {list(tensor.shape)}, strides {list(tensor.stride())}, storage offset "
                f"{tensor.storage_offset()}, and itemsize {tensor.itemsize} are out of bounds"
            )
        raise TensorValueError(
            name, problem, came=f"a storage of {has} bytes", accepted=f"{needs} bytes or more"
        )
    return address


def check_before_pytorch(**tensors: Tensor | None) -> None:
    """Raise for the first tensor whose storage is too small: PyTorch's operators do not look.

    For tensors that those read on our behalf, also within transforms. Other opaque ones are left to
    their classes.
    """
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        found = tensor
        while found is not None and _is_wrapped(found):
            found = _unwrapped(found)
        if found is not None and not is_opaque(found):
            check_memory(found, name)


def check_moved(**tensors: Tensor) -> None:
    """Raise for the first running statistics that PyTorch's operators could not write to."""
    check_before_pytorch(**tensors)
    if not torch.compiler.is_compiling():
        for name, tensor in tensors.items():
            if not is_opaque(tensor):
                check_own_memory(tensor, name)


def _are_objects_counted() -> bool:
    """Whether the Python object of a storage, once made, is counted among its users."""
    tensor = torch.empty(1, device="cpu")
    if users_of(storage_of(tensor)) != 1:
        return False
    tensor.untyped_storage()
    return bool(users_of(storage_of(tensor)) > 1)


#: ``users_of(storage_of(tensor))`` is how many hold the tensor's storage: tensors, and the Python
#: object of the storage, which stays for as long as that. A storage with one user has never had an
#: object, without which Python cannot resize it: code of calls need not look at its length. Nor
#: should it: looking makes the object, and autograd adds gradients in place only where nothing but
#: one tensor holds the storage, such as dy of a block with a residual. Before PyTorch 2.10 objects
#: are not counted, and do no harm.
storage_of: Callable[[Tensor], int] = getattr(torch._C, "_storage_address", id)
users_of: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
if not _are_objects_counted():  # pragma: no cover
    storage_of, users_of = id, lambda _: 2


def is_beyond(tensor: Tensor) -> bool:
    """Whether a tensor ends behind its storage."""
    return tensor.untyped_storage().nbytes() < _bytes_to_the_end(tensor)


def _bytes_to_the_end(tensor: Tensor) -> int:
    """Return how long a tensor's storage must be."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = tensor.storage_offset() + sum((size - 1) * step for size, step in steps)
    return (last + 1) * tensor.itemsize


def check_own_memory(tensor: Tensor, name: str) -> None:
    """Raise unless every element of a per-channel tensor has memory of its own to be moved in."""
    if tensor._is_zerotensor() or (tensor.numel() > 1 and 0 in tensor.stride()):
        raise TensorValueError(
            name,
            "is moved in place, and its elements have no memory of their own",
            accepted="a tensor that can be written to",
            hint=f"pass {name}.clone()",
        )


class _Memory:
    """The base of an array on a tensor's memory. It keeps the tensor.

    `Tensor.numpy` would too, but after it the tensor's memory cannot be resized any more.
    """

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, name: str) -> None:
        address = check_memory(tensor, name)
        self._tensor = tensor
        strides = None
        if not tensor.is_contiguous():
            strides = tuple(tensor.itemsize * step for step in tensor.stride())
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tensor.shape,
            "strides": strides,
            "typestr": _typestr(tensor.dtype, name),
            "version": 3,
        }


@functools.cache
def _typestr(dtype: torch.dtype, name: str) -> str:
    # NumPy has no bfloat16: over as integers.
    like = torch.empty(0, dtype=torch.int16 if dtype is torch.bfloat16 else dtype)
    try:
        return like.numpy().dtype.str
    except TypeError as error:
        raise TensorTypeError(name, "unsupported element type", came=dtype) from error


def array_of(tensor: Tensor, name: str = "tensor") -> np.ndarray:
    """Return the tensor's memory as an array; errors call it `name`."""
    tensor = in_memory(tensor, name)
    if not plain(tensor):
        check_memory(tensor, name)
        tensor = tensor.detach().clone()
    array = np.asarray(_Memory(tensor, name))
    return array.view(ml_dtypes.bfloat16) if tensor.dtype is torch.bfloat16 else array


def tensor_of(array: np.ndarray) -> Tensor:
    """Return a new tensor with an array's elements."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).clone()
    return torch.from_numpy(array).clone()


def as_type(weight: Tensor | None, gradient: Tensor) -> Tensor:
    """Return the gradient of a parameter in the parameter's type."""
    return gradient if weight is None else gradient.to(weight.dtype)
