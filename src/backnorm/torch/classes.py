"""Tensors of other classes: which of them are memory, and which only operators know.

Kernels read memory. What a class says of its own shape and memory is not asked: a tensor of a
subclass that is memory is taken for what PyTorch knows it to be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from backnorm.errors import BacknormError
from backnorm.torch.checks import TensorTypeError, not_a_tensor

__all__ = [
    "PLAIN",
    "OpaqueTensorError",
    "as_plain",
    "asked",
    "dispatch_keys",
    "in_memory",
    "is_opaque",
]

#: The classes of tensors whose methods are PyTorch's own.
PLAIN = (Tensor, Parameter)

dispatch_keys = torch._C._dispatch_keys


def _keys_in_memory() -> int:
    """Return the dispatcher's keys of tensors that are memory, as bits."""
    keys = torch._C.DispatchKey
    devices = [keys.CPU, keys.AutogradCPU, keys.AutocastCPU]
    devices += [keys.CUDA, keys.AutogradCUDA, keys.AutocastCUDA]
    bits = 0
    # Conjugates are refused by their types.
    for key in (*devices, keys.Negative, keys.Conjugate, keys.ZeroTensor, keys.ADInplaceOrView):
        bits |= torch._C.DispatchKeySet(key).raw_repr()
    return bits


_IN_MEMORY = _keys_in_memory()


class OpaqueTensorError(TensorTypeError):
    """A tensor came where only memory can be read."""


def is_opaque(tensor: Tensor) -> bool:
    """Whether only operators know the elements of a tensor: there is no memory that holds them.

    So it is with a subclass that wraps other tensors, tensors that are fake or traced, and those
    of transforms. Those of another layout, or on other devices, are opaque as well.
    """
    return bool(dispatch_keys(tensor).raw_repr() & ~_IN_MEMORY)


def in_memory(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor of a subclass as a plain one, or raise if it is opaque.

    What its class says of shape and memory is not asked.
    """
    if not issubclass(type(tensor), Tensor):
        raise not_a_tensor(name, tensor)
    found: Tensor = as_plain(tensor)
    if type(found) not in PLAIN:
        raise OpaqueTensorError(
            name,
            "has no elements in memory of its own",
            came=type(tensor).__name__,
            accepted="torch.Tensor",
        )
    return found


def as_plain(value: Any) -> Any:
    """Return a tensor of a subclass that is memory as a plain one; anything else as it is."""
    if type(value) in PLAIN or not issubclass(type(value), Tensor) or is_opaque(value):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor.as_subclass(value, Tensor)


def asked(operators: Callable[..., Any], *arguments: Any, **tensors: Any) -> Any:
    """Return what operators return, which ask the classes of `tensors`, whose names are given.

    A class refuses in many ways what it does not know, or not beside tensors of others: that
    becomes one error, which names a tensor.
    """
    if torch.compiler.is_compiling():
        return operators(*arguments)
    try:
        return operators(*arguments)
    except Exception as error:
        opaque = {
            name: each
            for name, each in tensors.items()
            if isinstance(each, Tensor) and is_opaque(each)
        }
        if not opaque or isinstance(error, BacknormError):
            raise
        name, tensor = next(iter(opaque.items()))
        reason = str(error).strip().partition("\n")[0]
        raise TensorTypeError(
            name,
            f"is not a tensor that is taken here ({type(error).__name__}: {reason})",
            came="of a transform or a trace" if type(tensor) in PLAIN else type(tensor).__name__,
            accepted="a tensor in memory",
        ) from error
