"""Allocation of large outputs: the memory of freed outputs is used again.

New memory costs as much as computing what is written to it: the system must find and clear its
pages. So the storages of outputs of 2 MiB and more are kept here, too. PyTorch's allocator made
them, and they can be resized like any. A storage that no tensor uses any more becomes the next
output of its size.

At most 768 MiB are kept. A new storage beyond that takes the place of unused ones, the longest
unused first, or is not kept. So no more than that stays resident when all outputs are freed.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import torch
from torch import Tensor

from backnorm.allocation import LARGE, advise

__all__ = ["empty_like", "unkept_like"]

_MOST_BYTES = 768 << 20

# How many of a size are looked at before a new one is made.
_LOOKS = 8

# Storages by their sizes, the longest unused first. A deque is changed by one atomic operation at a
# time: finalisers and other threads may make outputs in between.
_kept: dict[int, deque[torch.UntypedStorage]] = {}

# Returns the use count of a storage: not in all versions of PyTorch.
_holders: Any = getattr(torch._C, "_storage_Use_Count", None)


def empty_like(x: Tensor) -> Tensor:
    """Return a new tensor that lies in memory as the dense x does."""
    size = x.nbytes
    if size < LARGE or _holders is None:
        return torch.empty_like(x)
    storage = _free(size)
    if storage is None:
        tensor = unkept_like(x)
        if _has_room(size):
            _keep(tensor.untyped_storage(), size)
        return tensor
    # Not a view of another tensor: autograd refuses to let the output of a function that is one be
    # changed in place, as a ReLU behind the layer does.
    tensor = torch.empty(0, dtype=x.dtype).set_(storage, 0, x.shape, x.stride())
    _keep(storage, size)
    return tensor


def unkept_like(x: Tensor) -> Tensor:
    """Return a new large tensor that lies in memory as the dense x does, and is not kept."""
    tensor = torch.empty_like(x)
    advise(tensor.data_ptr(), x.nbytes)
    return tensor


def _free(size: int) -> torch.UntypedStorage | None:
    """Take an unused storage of this size off its shelf, if there is one."""
    shelf = _kept.get(size)
    if shelf is None:
        return None
    for _ in range(min(_LOOKS, len(shelf))):
        storage, free = _oldest(shelf)
        # Its user may have resized it, or moved it to memory that processes share.
        if storage is None or storage.nbytes() != size or storage.is_shared():
            continue
        if free:
            return storage
        shelf.append(storage)
    return None


def _oldest(shelf: deque[torch.UntypedStorage]) -> tuple[torch.UntypedStorage | None, bool]:
    """Take the first storage from a shelf; return it, if any, and whether it is unused.

    Then no tensor has it, of Python's or not, and the reference here is the only one.
    """
    try:
        storage = shelf.popleft()
    except IndexError:
        return None, False
    free = sys.getrefcount(storage) == _ALONE and _holders(storage._cdata) == 1
    return storage, free


def _keep(storage: torch.UntypedStorage, size: int) -> None:
    _kept.setdefault(size, deque()).append(storage)


def _has_room(size: int) -> bool:
    """Whether so many bytes more can be kept; unused storages make room."""
    shelves = list(_kept.items())
    total = size + sum(each * len(shelf) for each, shelf in shelves)
    for each, shelf in shelves:
        for _ in range(len(shelf)):
            if total <= _MOST_BYTES:
                return True
            storage, free = _oldest(shelf)
            if storage is None or free:
                total -= each
            else:
                shelf.append(storage)
    return total <= _MOST_BYTES


def _references(shelf: deque[torch.UntypedStorage]) -> int:
    storage = shelf.popleft()
    return sys.getrefcount(storage)


#: What `sys.getrefcount` returns above for an unused storage: not the same in all versions of
#: Python.
_ALONE = _references(deque([torch.UntypedStorage(1)]))
