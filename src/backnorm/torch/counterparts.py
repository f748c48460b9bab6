"""Which of our classes stands for which of PyTorch's, timm's and torchvision's.

Neither timm nor torchvision is imported, unless a class comes from it.
"""

from __future__ import annotations

import importlib

import torch

from backnorm.torch import modules

__all__ = ["Class", "original_of", "ours_for"]

Class = type[torch.nn.Module]

_OURS: dict[Class, Class] = {
    torch.nn.BatchNorm1d: modules.BatchNorm1d,
    torch.nn.BatchNorm2d: modules.BatchNorm2d,
    torch.nn.BatchNorm3d: modules.BatchNorm3d,
    torch.nn.SyncBatchNorm: modules.SyncBatchNorm,
    torch.nn.LazyBatchNorm1d: modules.LazyBatchNorm1d,
    torch.nn.LazyBatchNorm2d: modules.LazyBatchNorm2d,
    torch.nn.LazyBatchNorm3d: modules.LazyBatchNorm3d,
}
# Where such classes are defined, and our module with their counterparts.
_LIBRARIES = {
    "timm.layers.norm_act": "backnorm.torch.timm",
    "torchvision.ops.misc": "backnorm.torch.torchvision",
}


def ours_for(cls: Class) -> Class | None:
    """Return our class for one of the others', or None."""
    if cls.__module__ in _LIBRARIES:
        library = importlib.import_module(_LIBRARIES[cls.__module__])
        found: Class | None = library.OURS.get(cls)
        return found
    return _OURS.get(cls)


def original_of(cls: Class) -> Class | None:
    """Return the class that one of ours stands for, or None."""
    pairs = _OURS
    if cls.__module__ in _LIBRARIES.values():
        pairs = importlib.import_module(cls.__module__).OURS
    return next((original for original, ours in pairs.items() if ours is cls), None)
