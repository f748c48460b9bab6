"""Have `torch.ao.quantization` take our layers as PyTorch's, where it works on modules.

Those are `fuse_modules`, `fuse_modules_qat`, `prepare`, `prepare_qat` and `convert`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.ao.quantization import fuser_method_mappings, quantization_mappings

from backnorm.torch.counterparts import original_of
from backnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d

__all__ = ["register"]

_OURS = {torch.nn.BatchNorm1d: BatchNorm1d, torch.nn.BatchNorm2d: BatchNorm2d,
         torch.nn.BatchNorm3d: BatchNorm3d}  # fmt: skip


def register() -> None:
    """Add our classes to the sequences of classes that PyTorch fuses, and to those it quantises."""
    quantised = quantization_mappings.DEFAULT_STATIC_QUANT_MODULE_MAPPINGS
    quantised |= {ours: quantised[each] for each, ours in _OURS.items() if each in quantised}
    methods = fuser_method_mappings._DEFAULT_OP_LIST_TO_FUSER_METHOD
    for classes, method in list(methods.items()):
        ours = tuple(_OURS.get(each, each) for each in classes)
        if ours != classes:
            methods[ours] = _reverting(method)


def _reverting(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return what gives `method` PyTorch's layers: what it makes of them looks at their class."""

    def fuse(is_qat: bool, *modules: torch.nn.Module) -> Any:
        for module in modules:
            original = original_of(type(module))
            if original is not None:
                # The activation's module, if one was fused, applies it again.
                module.__dict__.pop("activation", None)
                module.__class__ = original
        return method(is_qat, *modules)

    return fuse
