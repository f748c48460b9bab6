"""Tensors that nobody else holds: a backward pass may write its results to their memory.

That saves new memory, whose cache lines are read before they are written, and what reads the result
next finds it in a cache. Such tensors are the gradient dy that came, and the x that was saved for
this backward pass, once the graph's node has let go of it.

Autograd itself adds to such gradients in place (`InputBuffer`), under the same conditions: nothing
else holds the tensor, or its storage. A tensor of Python has a count of its own, too: how many hold
its object, of which a call has a few itself. How many those are is found out once, of tensors that
are known to be nobody else's.

No count tells of memory that a tensor was made around, such as an array's. PyTorch's own allocator
aligns to 64 bytes; what lies otherwise is not written to. Of x more is asked: the function that
made it may have it from elsewhere, and read it in its own backward pass. Only memory of PyTorch's
can be resized.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from backnorm.torch.classes import PLAIN
from backnorm.torch.memory import check_memory, plain, storage_of, users_of

__all__ = [
    "NOTHING",
    "Holders",
    "Spare",
    "holders",
    "laid_out",
    "places",
    "released",
    "spare",
    "wants_x",
]

# Bytes: c10's `gAlignment`.
_ALIGNMENT = 64

#: Those of a tensor, of its object, and of its storage.
Holders = tuple[int, int, int]

#: What may be written over: dy, and x, or None in the place of either.
Spare = tuple[Tensor | None, Tensor | None]

NOTHING: Spare = (None, None)

_Function = Callable[[Tensor], Tensor]


def holders(tensor: Tensor) -> Holders | None:
    """Return how many hold a tensor; of dy, call it in `backward`, first of all."""
    if type(tensor) not in PLAIN or not _has_counts():
        return None
    try:
        return tensor._use_count(), sys.getrefcount(tensor), users_of(storage_of(tensor))
    except RuntimeError:
        # It has no storage of its own: of a transform, of the meta device.
        return None


def wants_x(x: Tensor, of_dy: Holders | None, has_residual: bool) -> bool:
    """Whether x is to be written over if nobody else holds it, given who holds dy."""
    dy_alone, x_alone = _alone()
    return (
        (has_residual or of_dy != dy_alone)
        and of_dy is not None
        and x_alone is not None
        # A leaf is held by what its gradient is added to.
        and not x.is_leaf
        and not torch.compiler.is_compiling()
    )


def released(ctx: Any, x: Tensor) -> Holders | None:
    """Return how many hold x but for the node that saved it, which lets go of it.

    Unless the graph is kept. Call it in `backward`, where x is a variable and nothing else has it.
    """
    ctx.maybe_clear_saved_tensors()
    return holders(x)


def spare(x: Tensor, dy: Tensor, of_x: Holders | None, of_dy: Holders | None) -> Spare:
    """Return which of x and dy may be written over, given who holds them."""
    dy_alone, x_alone = _alone()
    over_dy = of_dy is not None and of_dy == dy_alone and not dy.requires_grad and _fits(dy, x)
    if of_x is not None and of_x == x_alone and _fits(x, x) and _is_of_pytorch(x):
        # Not `detach`, which is a view: it would hold x.
        return dy if over_dy else None, x.data
    return (dy, None) if over_dy else NOTHING


def places(spare: Spare, has_residual: bool) -> tuple[Tensor | None, ...] | None:
    """Return where the gradients of x and of the residual are written, None for new memory.

    Of dy the kernel makes the gradient of the residual element by element, after that of x: it can
    be written over dy, and that of x cannot.
    """
    if spare is NOTHING:
        return None
    dy, x = spare
    return (x, dy) if has_residual else (x if dy is None else dy,)


def laid_out(dy: Tensor, x: Tensor, spare: Spare) -> tuple[Tensor, Spare]:
    """Return a gradient that lies in memory as x does, and what may be written over then.

    What was concatenated has gradients that are parts of one, with gaps between them. Kernels read
    none with gaps: of such a one a copy is returned, which nobody else holds. To leave it to the
    call took 20 us more: it repeats the validation of what it must copy.

    Raises
    ------
    TensorValueError
        If there is no memory to copy from.
    """
    try:
        if dy.stride() == x.stride():
            return dy, spare
    except RuntimeError:
        # One is sparse.
        return dy, spare
    if (
        not (dy.layout is x.layout is torch.strided)
        or type(dy) not in PLAIN
        or type(x) not in PLAIN
        or not (dy.is_cpu and x.is_cpu)
        or dy.dtype is not x.dtype
        or dy.shape != x.shape
        or not _is_in_order(x)
    ):
        return dy, spare
    check_memory(dy, "dy")
    copied = torch.empty_like(x).copy_(dy)
    return copied, (copied, spare[1])


def _fits(tensor: Tensor, x: Tensor) -> bool:
    """Whether a result that lies in memory as x does can lie where a tensor does."""
    if (
        not tensor.is_cpu
        or tensor.dtype is not x.dtype
        or tensor.stride() != x.stride()
        or not _is_in_order(tensor)
        or tensor.is_inference()
        or not plain(tensor)
    ):
        return False
    address = tensor.data_ptr()
    return address != 0 and address % _ALIGNMENT == 0


def _is_of_pytorch(tensor: Tensor) -> bool:
    """Whether a tensor's memory is of PyTorch's allocator, and of this process alone."""
    storage = tensor.untyped_storage()
    return storage.resizable() and not storage.is_shared()


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
def _alone() -> tuple[Holders | None, Holders | None]:
    """Return the holders of a dy and an x that are nobody else's, None for what shows nothing."""
    found: list[tuple[Holders | None, Holders | None]] = []
    # In a thread of its own, in which none of the caller's modes and hooks hold.
    thread = threading.Thread(target=_try, args=(found,), name="backnorm-ownership")
    try:
        thread.start()
    except RuntimeError:
        # No more threads can be had, or the interpreter is about to end.
        return None, None
    thread.join()
    if len(found) != len(_KINDS):
        return None, None
    (of_dy, *of_dys), (of_x, *of_xs) = zip(*found, strict=True)
    begin = len(_DY_BY_OTHERS)
    return _told(of_dy, of_dys[:begin]), _told(of_x, of_xs[begin:])


def _told(alone: Holders | None, others: list[Holders | None]) -> Holders | None:
    """Return who holds what is nobody else's, if that differs from whatever others hold."""
    # Without a count of storages, that of nobody's is 0.
    told = alone is not None and alone[2] == 1 and alone not in others
    return alone if told else None


class _Probe(Function):
    """A function whose backward pass tells who holds its gradient, and what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Any]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        held = holders(dy)
        (x,) = ctx.saved_tensors
        ctx.found.append((held, released(ctx, x)))
        return dy.clone(), None


def _try(found: list[Any]) -> None:
    for use in _KINDS:
        use(lambda x: _Probe.apply(x, found))


def _new() -> Tensor:
    # No leaf: that is held by what its gradient is added to.
    return torch.ones(2, 3, device="cpu", requires_grad=True).clone()


def _differentiate(y: Tensor, **how: Any) -> None:
    (y * y).sum().backward(**how)


def _by_nobody(probe: _Function) -> None:
    _differentiate(probe(_new()))


def _dy_by_a_hook(probe: _Function) -> None:
    kept: list[Tensor] = []
    y = probe(_new())
    y.register_hook(kept.append)
    _differentiate(y)


def _dy_by_the_caller(probe: _Function) -> None:
    y = probe(_new())
    dy = torch.ones_like(y)
    y.backward(dy)


def _dy_by_a_view(probe: _Function) -> None:
    _differentiate(probe(_new()).view(3, 2))


def _x_by_the_caller(probe: _Function) -> None:
    x = _new()
    _differentiate(probe(x))


def _x_by_a_view(probe: _Function) -> None:
    x = _new()
    view, y = x.view(3, 2), probe(x)
    del x
    _differentiate(y)
    del view


def _x_by_another_node(probe: _Function) -> None:
    x = _new()
    # Its backward pass runs after that of the probe, which was made later.
    also = x * x
    y = probe(x) + also
    del x, also
    _differentiate(y)


def _x_by_the_graph(probe: _Function) -> None:
    _differentiate(probe(_new()), retain_graph=True)


_DY_BY_OTHERS = (_dy_by_a_hook, _dy_by_the_caller, _dy_by_a_view)
_X_BY_OTHERS = (_x_by_the_caller, _x_by_a_view, _x_by_another_node, _x_by_the_graph)
_KINDS = (_by_nobody, *_DY_BY_OTHERS, *_X_BY_OTHERS)
