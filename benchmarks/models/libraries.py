"""Import timm and torchvision with PyTorch for the CPU, even if torchvision needs CUDA."""

from __future__ import annotations

import importlib
import sys
import types

import torch

# Operators that torchvision's library defines, and that its Python code requires.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[torch.library.Library] = []


def torchvision() -> types.ModuleType:
    """Return torchvision; declare its operators if its library cannot be loaded."""
    try:
        return importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        _kept.append(library)
        for operator in _OPERATORS:
            library.define(operator)
        for name in [each for each in sys.modules if each.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        return importlib.import_module("torchvision")


def timm() -> types.ModuleType:
    """Return timm, which imports torchvision."""
    torchvision()
    return importlib.import_module("timm")
