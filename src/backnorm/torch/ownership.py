"""Gradients that nobody else holds: a backward pass may write its result to their memory.

That saves new memory, whose cache lines are read before they are written, and what reads the result
next finds it in a cache. Autograd itself adds to such gradients in place (`InputBuffer`), under the
same conditions: nothing else holds the tensor, or its storage. A tensor of Python has a count of
its own, too: how many hold its object, of which a call has a few itself. How many that are is
found out once, of a gradient that is known to be nobody else's.

No count tells of memory that a tensor was made around, such as an array's. PyTorch's own allocator
aligns to 64 bytes; what lies otherwise is not written to.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch.classes import PLAIN
from backnorm.torch.memory import check_memory, plain, storage_of, users_of

__all__ = ["Holders", "holders", "laid_out", "spare"]

# Bytes: c10's `gAlignment`.
_ALIGNMENT = 64

#: Those of a tensor, of its object, and of its storage.
Holders = tuple[int, int, int]


def holders(dy: Tensor) -> Holders | None:
    """Return how many hold dy; call it with the argument of `backward`, first of all."""
    if type(dy) not in PLAIN or not _has_counts():
        return None
    try:
        return dy._use_count(), sys.getrefcount(dy), users_of(storage_of(dy))
    except RuntimeError:
        # It has no storage of its own: of a transform, of the meta device.
        return None


def spare(dy: Tensor, held: Holders | None, x: Tensor) -> Tensor | None:
    """Return dy if the gradient of x may be written to it, or None."""
    if (
        held is None
        or held != _alone()
        or not dy.is_cpu
        or dy.dtype is not x.dtype
        or dy.stride() != x.stride()
        or not _is_in_order(dy)
        or dy.requires_grad
        or dy.is_inference()
        or not plain(dy)
    ):
        return None
    address = dy.data_ptr()
    return dy if address and address % _ALIGNMENT == 0 else None


def laid_out(dy: Tensor, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return a gradient that lies in memory as x does, and where the gradient of x may be written.

    What was concatenated has gradients that are parts of one, with gaps between them. Kernels read
    none with gaps: of such a one a copy is returned, twice, as nobody else holds that. To leave it
    to the call took 20 us more: it repeats the validation of what it must copy.

    Raises
    ------
    TensorValueError
        If there is no memory to copy from.
    """
    if (
        # Others have no strides to be asked for.
        not (dy.layout is x.layout is torch.strided)
        or dy.stride() == x.stride()
        or type(dy) not in PLAIN
        or type(x) not in PLAIN
        or not (dy.is_cpu and x.is_cpu)
        or dy.dtype is not x.dtype
        or dy.shape != x.shape
        or not _is_in_order(x)
    ):
        return dy, out
    check_memory(dy, "dy")
    copied = torch.empty_like(x).copy_(dy)
    return copied, copied


def _is_in_order(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, or channels_last."""
    if tensor.is_contiguous():
        return True
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    return tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d)


@functools.cache
def _has_counts() -> bool:
    """Whether tensors and objects have such counts: without a GIL those of objects lag behind."""
    return hasattr(Tensor, "_use_count") and getattr(sys, "_is_gil_enabled", lambda: True)()


@functools.cache
def _alone() -> Holders | None:
    """Return the holders of a gradient that is nobody else's, or None if that shows nothing."""
    found: list[Holders | None] = []
    # In a thread of its own, in which none of the caller's modes and hooks hold.
    thread = threading.Thread(target=_try, args=(found,), name="backnorm-ownership")
    try:
        thread.start()
    except RuntimeError:
        # No more threads can be had, or the interpreter is about to end.
        return None
    thread.join()
    if len(found) != len(_KINDS):
        return None
    alone, *others = found
    # Without a count of storages, that of nobody's is 0.
    told = alone is not None and alone[2] == 1 and alone not in others
    return alone if told else None


class _Probe(Function):
    """A function whose backward pass tells who holds its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Any]) -> Tensor:
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        held = holders(dy)
        ctx.found.append(held)
        return dy.clone(), None


def _try(found: list[Any]) -> None:
    for use in _KINDS:
        x = torch.ones(2, 3, device="cpu", requires_grad=True)
        y = _Probe.apply(x, found)
        use(y)


def _by_nobody(y: Tensor) -> None:
    (y * y).sum().backward()


def _by_a_hook(y: Tensor) -> None:
    kept: list[Tensor] = []
    y.register_hook(kept.append)
    _by_nobody(y)


def _by_the_caller(y: Tensor) -> None:
    dy = torch.ones_like(y)
    y.backward(dy)


def _by_a_view(y: Tensor) -> None:
    _by_nobody(y.view(3, 2))


_KINDS = (_by_nobody, _by_a_hook, _by_the_caller, _by_a_view)
