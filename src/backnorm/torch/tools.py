"""Support for tools that recognise layers by PyTorch's classes, and so miss backnorm's layers.

Passes over a graph of `torch.fx` look for PyTorch's layers and do not change backnorm's, so
`warn_of_tracing` warns when `torch.fx` traces a layer of backnorm. Opacus rejects a model that
contains PyTorch's classes of batch normalisation, so this module registers backnorm's classes with
the validator of Opacus. `torch.jit.script` cannot compile backnorm's Python code, so this module
makes it raise an error. This module does not import Opacus.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import torch

from backnorm.errors import BacknormError

_Target = TypeVar("_Target")


class UnrecognisedLayerWarning(UserWarning):
    """A tool that recognises PyTorch's layers by class was used with a layer of backnorm."""


def warn_of_tracing(tracer: object, training: bool) -> None:
    """Warn if a PyTorch tracer records a layer of backnorm, because no pass over the traced graph
    can fold this layer into a convolution.

    The passes of `torch.fx` fold a normalisation into the preceding convolution only in evaluation
    mode. So if a tracer of `torch.fx` records a layer in training mode, there is no warning.
    Quantisation (`torch.ao`) folds every layer that it traces, so layers in training cause the
    warning there, too. The tracers of other libraries, such as torchvision's feature extraction,
    cause no warning, because no pass folds the layers that they record.
    """
    module = type(tracer).__module__
    if module.startswith("torch.ao.") or (module.startswith("torch.fx.") and not training):
        warnings.warn(
            "torch.fx recorded a layer of backnorm. Passes that match torch.nn.BatchNorm2d by "
            "class (torch.fx.experimental.optimization.fuse, prepare_fx) do not change it; call "
            "backnorm.torch.revert(model) before such a pass",
            UnrecognisedLayerWarning,
            # With `stacklevel=1`, the warning has the same location for every tracer, so that
            # Python's default filter shows it only once.
            stacklevel=1,
        )


def unscriptable(target: _Target) -> _Target:
    """Make `torch.jit.script` raise an error for a function or a class of modules, and for modules
    that use it.
    """
    scripted: Any = target
    # TorchScript calls this attribute of each function and module that it compiles.
    scripted.__prepare_scriptable__ = _raise_unscriptable
    return target


def _raise_unscriptable(*_: object) -> NoReturn:
    raise BacknormError(
        "torch.jit.script cannot compile backnorm's modules and functions; script "
        "backnorm.torch.revert(model) and torch.nn.functional.batch_norm instead, or use "
        "torch.compile, torch.export or torch.jit.trace"
    )


def register_with_opacus(base: type[torch.nn.Module]) -> None:
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
