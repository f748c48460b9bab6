"""Opacus, which refuses batch normalisation: its validator and fixer, for backnorm's layers.

Opacus recognises PyTorch's layers by class, and so misses backnorm's. This module does not import
Opacus.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch


def register(base: type[torch.nn.Module]) -> None:
    """Register `base` and its subclasses with Opacus' validator and fixer, if Opacus is imported.

    The validator then rejects layers of these classes, and the fixer replaces them, as both do with
    PyTorch's `BatchNorm2d`.
    """
    validators = sys.modules.get("opacus.validators")
    if validators is not None:
        registry = validators.ModuleValidator
        for cls in _descendants(base):
            registry.VALIDATORS.setdefault(cls, registry.VALIDATORS[torch.nn.BatchNorm2d])
            registry.FIXERS.setdefault(cls, _fixed)


def _descendants(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _descendants(subclass)


def _fixed(layer: Any, **options: Any) -> torch.nn.Module:
    """Return Opacus's replacement for a layer. A fused activation follows the replacement.

    A layer with another activation is returned unchanged, because a replacement would lose the
    activation. The model then still has a layer of backnorm, so Opacus's validator rejects the
    model.
    """
    if layer.fused is None and layer.following() is not None:
        return layer
    fix = sys.modules["opacus.validators"].ModuleValidator.FIXERS[torch.nn.BatchNorm2d]
    fixed: torch.nn.Module = fix(layer, **options)
    return fixed if layer.fused is None else torch.nn.Sequential(fixed, layer.fused.module)
