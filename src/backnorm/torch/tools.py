"""Tools that do not take our layers as they take PyTorch's.

Passes over a graph of `torch.fx` recognise layers by their exact class and leave ours as they are;
whoever traces is warned. Opacus refuses batch normalisation by class; our classes are registered
with its validator. Opacus is not imported here. `torch.jit.script` compiles Python, and cannot
compile ours; it raises.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn, TypeVar

import torch

from backnorm.errors import BacknormError

__all__ = [
    "UnrecognisedLayerWarning",
    "check_validated",
    "register_with_opacus",
    "unscriptable",
    "warn_of_tracing",
]

_Target = TypeVar("_Target")


class UnrecognisedLayerWarning(UserWarning):
    """A tool that recognises PyTorch's layers by class has a layer of backnorm before it."""


def warn_of_tracing(tracer: object, training: bool) -> None:
    """Warn where a tracer of PyTorch's records a layer of ours that a pass may be meant to fold.

    Those are layers in evaluation, and all layers that quantisation traces. Tracers of other
    libraries, as torchvision's feature extraction, have other purposes.
    """
    module = type(tracer).__module__
    if module.startswith("torch.ao.") or (module.startswith("torch.fx.") and not training):
        warnings.warn(
            "torch.fx recorded a layer of backnorm. Passes that match torch.nn.BatchNorm2d by "
            "class (torch.fx.experimental.optimization.fuse, prepare_fx) leave it as it is; call "
            "backnorm.torch.revert(model) before such a pass",
            UnrecognisedLayerWarning,
            # One place, whoever traces: Python's default filter shows the warning once a process.
            stacklevel=1,
        )


def unscriptable(target: _Target) -> _Target:
    """Make `torch.jit.script` raise for a function or a class of modules, nested ones included."""
    scripted: Any = target
    # PyTorch calls it of everything that it compiles: of modules as a method.
    scripted.__prepare_scriptable__ = _raise_unscriptable
    return target


def _raise_unscriptable(*_: object) -> NoReturn:
    raise BacknormError(
        "torch.jit.script cannot compile backnorm's modules and functions; script "
        "backnorm.torch.revert(model) and torch.nn.functional.batch_norm instead, or use "
        "torch.compile, torch.export or torch.jit.trace"
    )


def register_with_opacus(base: type[torch.nn.Module]) -> None:
    """Register `base` and its subclasses with Opacus' validator and fixer, if it is imported.

    The validator reports them as it does PyTorch's, and the fixer replaces them.
    """
    validators = sys.modules.get("opacus.validators")
    if validators is None:
        return
    registry = validators.ModuleValidator
    ours = list(_descendants(base))
    validate = registry.VALIDATORS[torch.nn.BatchNorm2d]
    unknown = [each for each in ours if each not in registry.VALIDATORS]
    validators.register_module_validator(unknown)(validate)
    unknown = [each for each in ours if each not in registry.FIXERS]
    validators.register_module_fixer(unknown)(_fixed)


def check_validated(layer: torch.nn.Module, base: type[torch.nn.Module]) -> None:
    """Raise if Opacus computes gradients of samples, and its validator did not know the layer.

    It does not if Opacus was imported after the layer was made. It does from now on.
    """
    validators = sys.modules.get("opacus.validators")
    if validators is None or type(layer) in validators.ModuleValidator.VALIDATORS:
        return
    register_with_opacus(base)
    hooks = sys.modules["opacus.grad_sample"].AbstractGradSampleHooks
    owners = (getattr(hook, "__self__", None) for hook in layer._forward_hooks.values())
    if any(isinstance(owner, hooks) for owner in owners):
        raise BacknormError(
            "Opacus computes per-sample gradients of a model with batch normalisation by backnorm, "
            "which its validator did not know when it validated the model. In training, batch "
            "normalisation mixes samples. Import opacus before the model is made, or call "
            "opacus.validators.ModuleValidator.validate(model, strict=True) again"
        )


def _descendants(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for each in cls.__subclasses__():
        yield from _descendants(each)


def _fixed(layer: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Return what Opacus puts in the place of PyTorch's layer; a layer that it cannot replace.

    The validator refuses such a layer: one with a ReLU, which would be lost.
    """
    # It imports the layers, which import this.
    from backnorm.torch.conversion import revert
    from backnorm.torch.counterparts import original_of

    fixers = sys.modules["opacus.validators"].ModuleValidator.FIXERS
    original = original_of(type(layer))
    if original not in fixers:
        return layer
    fixed: torch.nn.Module = fixers[original](revert(layer), **options)
    return fixed
