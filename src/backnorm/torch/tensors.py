"""Tensors: their types, classes and memory, and which calls need the dispatcher.

Kernels read memory. A tensor is *plain* if its class is `Tensor` or `Parameter` (`PLAIN`). A tensor
of another subclass is treated as a plain tensor if it has memory, even if the subclass overrides
`shape`. An *opaque* tensor has no memory; only operators can read its elements.

New tensors are allocated by PyTorch, not by NumPy, because a tensor in the memory of a NumPy array
has two limits. It cannot be resized. If an autograd function returns a view of such a tensor, the
view cannot be changed in place, for example by a ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ml_dtypes
import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from backnorm.allocation import LARGE, advise
from backnorm.errors import BacknormError
from backnorm.layout import Order, by_strides, mask_size
from backnorm.problem import Metadata, check_mask
from backnorm.torch.checks import TensorTypeError, TensorValueError, not_a_tensor

Result = TypeVar("Result")

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


#: The classes of tensors whose methods are PyTorch's own.
PLAIN = (Tensor, Parameter)

dispatch_keys = torch._C._dispatch_keys


def _keys_in_memory() -> int:
    """Return the dispatch keys that tensors with memory may have, as a bit mask."""
    keys = torch._C.DispatchKey
    devices = [keys.CPU, keys.AutogradCPU, keys.AutocastCPU]
    devices += [keys.CUDA, keys.AutogradCUDA, keys.AutocastCUDA]
    bits = 0
    # The key `Conjugate` is included because tensors with this key, which are complex, have memory.
    # (The checks of element types reject complex tensors.)
    for key in (*devices, keys.Negative, keys.Conjugate, keys.ZeroTensor, keys.ADInplaceOrView):
        bits |= torch._C.DispatchKeySet(key).raw_repr()
    return bits


_IN_MEMORY = _keys_in_memory()


def is_opaque(tensor: Tensor) -> bool:
    """Whether only operators can read the elements of a tensor, because no memory holds them.

    Opaque tensors are those of wrapper subclasses, fake tensors, traced tensors, tensors inside
    transforms, and tensors that are not strided or not on a CPU or CUDA device.
    """
    return bool(dispatch_keys(tensor).raw_repr() & ~_IN_MEMORY)


# These functions are looked up once, because every call needs them.
_are_transforms_active = torch._C._are_functorch_transforms_active
_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._get_tracing_state

#: is_batched(tensor): whether a tensor is a batch of gradients. If the argument
#: ``is_grads_batched`` of `torch.autograd.grad` is true, a backward pass is called with such a
#: batch as dy.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def needs_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a call on tensors must run as operators of PyTorch's dispatcher, not directly.

    The result is True in these cases: under `torch.compile` and `torch.export` (`is_compiling`);
    under `torch.func` and forward-mode differentiation; under modes that see every operator (fake
    tensors, `make_fx`, FLOP counters); under `torch.jit.trace`; for a tensor that is opaque, such
    as a batch of gradients (``is_grads_batched``), or of a subclass other than `Parameter`.
    """
    return (
        is_compiling()
        or _are_transforms_active()
        or _modes() > 0
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or not _are_in_memory(tensors)
    )


def _are_in_memory(tensors: Sequence[Tensor | None]) -> bool:
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in PLAIN or is_opaque(tensor)):
            return False
    return True


def is_transformed() -> bool:
    """Whether forward mode, or a transform of `torch.func`, is active."""
    return forward_ad._current_level >= 0 or _are_transforms_active()


def in_memory(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor as a plain tensor, or raise if it has no elements in memory.

    If a subclass of Tensor overrides methods, these methods are not called.
    """
    if not issubclass(type(tensor), Tensor):
        raise not_a_tensor(name, tensor)
    found: Tensor = as_plain(tensor)
    if type(found) not in PLAIN:
        raise TensorTypeError(
            name,
            "has no elements in memory",
            came=type(tensor).__name__,
            accepted="torch.Tensor",
        )
    return found


def as_plain(value: Any) -> Any:
    """Return a tensor of a subclass as a plain tensor, if the tensor has memory.

    Any other value is returned unchanged.
    """
    if type(value) in PLAIN or not issubclass(type(value), Tensor) or is_opaque(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(value, Tensor)


def by_operators(operators: Callable[..., Result], *arguments: Any, **tensors: Any) -> Result:
    """Call operators and return their results; `tensors` are the tensor arguments by name.

    Tensor subclasses raise errors of many kinds for operators that they do not support, or do not
    support together with other classes. A TensorTypeError that names a tensor replaces these
    errors.
    """
    try:
        return operators(*arguments)
    except Exception as error:
        if is_compiling() or isinstance(error, BacknormError):
            raise
        opaque = [
            (name, tensor)
            for name, tensor in tensors.items()
            if isinstance(tensor, Tensor) and is_opaque(tensor)
        ]
        if not opaque:
            raise
        name, tensor = opaque[0]
        reason = str(error).strip().partition("\n")[0]
        raise TensorTypeError(
            name,
            f"must be a tensor in memory ({type(error).__name__}: {reason})",
            came="of a transform or a trace" if type(tensor) in PLAIN else type(tensor).__name__,
            accepted="a tensor in memory",
        ) from error


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


def empty_like(x: Tensor) -> Tensor:
    """Return a new tensor with the shape, type and strides of x, which must be dense.

    Large memory is requested in huge pages: writing to 51 MB of new memory took 23 ms in pages of
    4 KiB and 12 ms in pages of 2 MiB (one thread, Intel Xeon).
    """
    tensor = torch.empty_like(x)
    if tensor.nbytes >= LARGE:
        advise(tensor.data_ptr(), tensor.nbytes)
    return tensor


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
