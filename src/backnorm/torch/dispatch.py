"""Which calls need PyTorch's dispatcher, and which classes of tensors kernels may read.

Kernels read memory. A tensor is *plain* if its class is `Tensor` or `Parameter` (`PLAIN`). A tensor
of another subclass is treated as a plain tensor if it has memory, even if the subclass overrides
`shape`. An *opaque* tensor has no memory; only operators can read its elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from backnorm.errors import BacknormError
from backnorm.torch.checks import TensorTypeError, not_a_tensor

Result = TypeVar("Result")


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

#: is_functional(tensor): whether a tensor is a wrapper of functionalisation.
is_functional = torch._is_functional_tensor

#: is_batched(tensor): whether a tensor is a batch of gradients. If the argument
#: ``is_grads_batched`` of `torch.autograd.grad` is true, a backward pass is called with such a
#: batch as dy.
is_batched = torch._C._functorch.is_legacy_batchedtensor


def is_watched(first: Tensor) -> bool:
    """Whether a call must run as operators of PyTorch's dispatcher, for tensors of any kind.

    The result is True under `torch.compile` and `torch.export` (`is_compiling`); under `torch.func`
    and forward-mode differentiation; under modes that see every operator (fake tensors, `make_fx`,
    FLOP counters); under `torch.jit.trace`; and if the first tensor is a batch of gradients
    (``is_grads_batched``).
    """
    return (
        is_compiling()
        or _are_transforms_active()
        or _modes() > 0
        or forward_ad._current_level >= 0
        or _tracing() is not None
        or is_batched(first)
    )


def needs_dispatcher(first: Tensor, *others: Tensor | None) -> bool:
    """Whether a call on tensors must run as operators of PyTorch's dispatcher, not directly.

    The result is True if the call is watched (`is_watched`), and for a tensor of a subclass other
    than `Parameter`, on another device than a CPU or a CUDA device, or in a wrapper of
    functionalisation. (A sparse tensor is not among these; kernels refuse it.)
    """
    return is_watched(first) or any(
        type(tensor) not in PLAIN or not (tensor.is_cpu or tensor.is_cuda) or is_functional(tensor)
        for tensor in (first, *others)
        if tensor is not None
    )


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
