"""Layers of PyTorch, timm and torchvision, and the class of backnorm that replaces each one.

timm and torchvision are imported only when a model has a layer of theirs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.fx import Proxy
from torch.nn.utils.parametrize import is_parametrized

from backnorm.arithmetics import Arithmetic
from backnorm.torch import functional, modules, tools
from backnorm.torch.activations import activation_of
from backnorm.torch.options import named
from backnorm.torch.separable import alteration_of

__all__ = [
    "REPLACEMENTS",
    "FrozenLayer",
    "LayerClass",
    "LayerWithActivation",
    "class_for",
    "is_batch_norm",
    "original_of",
    "replacement_of",
]

LayerClass: TypeAlias = type[torch.nn.Module]

#: The classes of backnorm by the classes that they replace. `backnorm.torch.timm` and
#: `backnorm.torch.torchvision` add theirs.
REPLACEMENTS: dict[LayerClass, LayerClass] = {
    torch.nn.BatchNorm1d: modules.BatchNorm1d,
    torch.nn.BatchNorm2d: modules.BatchNorm2d,
    torch.nn.BatchNorm3d: modules.BatchNorm3d,
    torch.nn.SyncBatchNorm: modules.SyncBatchNorm,
    torch.nn.LazyBatchNorm1d: modules.LazyBatchNorm1d,
    torch.nn.LazyBatchNorm2d: modules.LazyBatchNorm2d,
    torch.nn.LazyBatchNorm3d: modules.LazyBatchNorm3d,
}
# The modules that define the layers of a library, and the modules that add their replacements.
_LIBRARIES = {
    "timm.layers.norm_act": "backnorm.torch.timm",
    "torchvision.ops.misc": "backnorm.torch.torchvision",
}


def is_batch_norm(module: torch.nn.Module) -> bool:
    """Return whether a module is batch normalisation, by its class or the name of its class."""
    return (
        isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        or "batchnorm" in type(module).__name__.lower()
    )


def replacement_of(cls: LayerClass) -> LayerClass | None:
    """Return the class of backnorm that replaces a class, or None."""
    if cls.__module__ in _LIBRARIES:
        importlib.import_module(_LIBRARIES[cls.__module__])
    return REPLACEMENTS.get(cls)


def original_of(cls: LayerClass) -> LayerClass | None:
    """Return the class that a class of backnorm replaces, or None."""
    pairs = REPLACEMENTS.items()
    return next((original for original, replacement in pairs if replacement is cls), None)


def class_for(
    module: torch.nn.Module, counterpart: Callable[[LayerClass], LayerClass | None]
) -> LayerClass:
    """Return the class that a module should get: the counterpart of its class, or its own class.

    A parametrised module has a subclass of its own, whose properties are its parameters. Such a
    module gets a subclass of the counterpart with the same properties.
    """
    cls = type(module)
    replacement = counterpart(cls)
    if replacement is None and is_parametrized(module):
        base = counterpart(cls.__bases__[0])
        if base is not None:
            replacement = type(cls.__name__, (base,), dict(vars(cls)))
    return replacement or cls


class LayerWithActivation:
    """Mixin for a layer that applies the modules `drop` and `act` after it normalises."""

    drop: torch.nn.Module
    act: torch.nn.Module

    #: Whether the layer computes the activation in the same pass, unless there is an obstacle.
    fuse_activation: bool = False

    def fusion_obstacle(self) -> str | None:
        """Return the reason why only the module `act` can compute the activation, or None."""
        drop, act = self.drop, self.act
        if not self.fuse_activation:
            return "it was converted without fuse=True"
        if activation_of(act) is None:
            return f"its activation is {type(act).__name__}"
        if type(drop) is not torch.nn.Identity:
            return f"{type(drop).__name__} comes before its activation"
        alteration = alteration_of(act) or alteration_of(drop)
        return f"its activation {alteration}" if alteration else None


@tools.unscriptable
class FrozenLayer:
    """Mixin for a layer whose statistics and parameters are constants."""

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    arithmetic: Arithmetic | None = None

    def __repr__(self) -> str:
        """Return the text of the library's layer, followed by the arithmetic if there is one."""
        return named(super().__repr__().removesuffix(")"), self.arithmetic) + ")"

    def _is_ordinary(self, x: Tensor) -> bool:
        """Return whether the library's formula would neither broadcast nor promote x."""
        mean, variance = self.running_mean, self.running_var
        return (
            not isinstance(x, Proxy)
            and x.dim() == 4
            and x.dtype.is_floating_point
            and x.dtype == mean.dtype == variance.dtype == self.weight.dtype == self.bias.dtype
            and x.shape[1] == mean.shape[0]
            and not (mean.requires_grad or variance.requires_grad)
        )

    def _normalised(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps,
            arithmetic=self.arithmetic,
        )  # fmt: skip
