"""A whole model, there and back."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn.utils.parametrize import is_parametrized

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.scalars import check_flag
from backnorm.torch import tools
from backnorm.torch.activations import Activation
from backnorm.torch.counterparts import Class, original_of, ours_for
from backnorm.torch.fusion import (
    Outcome,
    check_names,
    fuse_pair,
    fuse_sequences,
    pairs_of,
    unfuse,
)
from backnorm.torch.kinds import Activated, Frozen
from backnorm.torch.modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    SyncBatchNorm,
    _BatchNorm,
    _BatchNormReLU,
)
from backnorm.torch.report import LayerReport, class_name, is_batch_norm, why_left

__all__ = ["ConversionWarning", "convert", "revert"]

Model = TypeVar("Model", bound=torch.nn.Module)

_SYNCHRONISED: dict[Class, Class] = dict.fromkeys(
    (BatchNorm1d, BatchNorm2d, BatchNorm3d), SyncBatchNorm
)


# Why a layer is not fused that no pair and no sequence shows.
_NOT_SHOWN = "it is not in a torch.nn.Sequential; a pair can be named"
_NOT_NAMED = "no pair names it"


class ConversionWarning(UserWarning):
    """A model has nothing that `convert` can convert."""


def convert(
    model: Model,
    fuse: bool | Iterable[tuple[str, str]] = False,
    report: Callable[[LayerReport], object] | None = None,
    *,
    arithmetic: Arithmetic | None = None,
    sync: bool = False,
    process_group: Any = None,
    reproducible: bool | None = None,
) -> Model:
    """Have backnorm compute the batch normalisation of a model.

    Every `torch.nn.BatchNorm1d`, `2d`, `3d` and `SyncBatchNorm` in `model`, itself included,
    becomes one of `backnorm.torch`, in place: the modules stay the same objects with the same
    parameters, buffers and hooks, and only their class changes. So do their lazy forms, timm's
    `BatchNormAct2d` and `FrozenBatchNormAct2d`, and torchvision's `FrozenBatchNorm2d`. Other
    subclasses stay as they are.

    Parameters
    ----------
    model : torch.nn.Module
    fuse : bool or iterable of (str, str)
        Whether a layer computes the activation that follows it, in one pass each way:
        `torch.nn.ReLU`, `ReLU6`, `Hardtanh` from 0 to a number of at most eight binary digits,
        `SiLU`, `Hardswish`. True: in every `torch.nn.Sequential`, and in timm's layers, which hold
        their activation. Pairs of names, as in `model.named_modules()`, of a layer and an
        activation: these. Then it is for the caller to know that the forward calls the activation
        with the result of the layer, and neither of them with or for anything else. The layer gets
        an `activation`, and the module of the activation becomes a `torch.nn.Identity` in its
        place. Modules with hooks, or with more than one place in the model, are not fused; a pair
        of such is an error.
    report : callable, optional
        Called with a `LayerReport` for each layer of batch normalisation, in the order of
        `model.named_modules()`, which says what became of it and why: ``report=print`` prints
        a line a layer, ``report=reports.append`` collects them.
    arithmetic : {"float32", "float64"}, optional
        What all these layers compute in from now on, those too that were backnorm's before
        (``layer.arithmetic``). Without it a layer says what it said, and one that was PyTorch's
        nothing: `backnorm.arithmetic` decides in each call.
    sync : bool
        Whether layers that normalise a batch by itself become `SyncBatchNorm`, which normalise the
        batch of all processes of a group: those of `BatchNorm1d`, `2d` and `3d`.
    process_group : torch.distributed.ProcessGroup, optional
        Of the layers that `sync` changes; all processes without it.
    reproducible : bool, optional
        Whether what these layers compute in training has the same bits however the batch is cut
        (``layer.reproducible``), with `sync` over any number of processes. Without it a layer does
        what it did.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ArgumentTypeError
        If an argument is of another type.
    ArgumentValueError
        If the arithmetic is neither, a process group comes without `sync`, or a pair of names
        cannot be fused.

    Warns
    -----
    ConversionWarning
        With `sync`, for layers that stay layers of one process.
    ConversionWarning
        If nothing in `model` can be converted, and nothing was.

    Notes
    -----
    A hook that is registered on a fused layer later, or on its activation, or another `forward`
    that one of them is given, separates the two: each computes what it did before `convert`. What
    a layer computes where the activation's module is not called, as in a part of a sequence,
    contains the activation. `revert` undoes everything.
    """
    _check_model(model)
    sync = check_flag("sync", sync)
    if type(fuse) in (bool, np.bool_):
        whole, names = bool(fuse), []
    else:
        whole, names = False, check_names(fuse)
    if process_group is not None and not sync:
        raise ArgumentValueError(
            "process_group",
            "is that of layers which become synchronised, and none do",
            accepted="a process group with sync=True",
        )
    if report is not None and not callable(report):
        raise ArgumentTypeError(
            "report",
            "must be something to call",
            came=described(report),
            accepted="None, or a function of a LayerReport, such as print",
        )
    if arithmetic is not None:
        arithmetic = check_arithmetic(arithmetic)
    if reproducible is not None:
        reproducible = check_flag("reproducible", reproducible)
    tools.register_with_opacus(_BatchNorm)
    pairs = pairs_of(model, names, _becomes)
    layers = [(name, module) for name, module in model.named_modules() if is_batch_norm(module)]
    before = [class_name(type(module)) for _, module in layers]
    for _, module in layers:
        _exchange(module, ours_for)
        if whole and isinstance(module, Activated):
            module.at_once = True
        if arithmetic is not None and _is_ours(module):
            module.arithmetic = arithmetic
        if reproducible is not None and isinstance(module, _BatchNorm):
            module.reproducible = reproducible
    if sync:
        _synchronise(layers, process_group)
    for name, module in layers:
        if isinstance(module, SyncBatchNorm):
            module.name = f"layer {name!r}" if name else "the model itself"
    outcomes = fuse_sequences(model) if whole else {}
    outcomes |= {layer: fuse_pair(layer, act) for layer, act in pairs}
    asked = _NOT_SHOWN if whole else _NOT_NAMED if names else ""
    reports = [
        _report(name, module, earlier, outcomes.get(module) or _alone(module, asked))
        for (name, module), earlier in zip(layers, before, strict=True)
    ]
    if not any(_is_ours(module) for _, module in layers):
        found = "".join(f"\n  {each}" for each in reports)
        warnings.warn(
            "nothing was converted: the model has no batch normalisation"
            + (f" that can be converted; it has{found}" if found else ""),
            ConversionWarning,
            stacklevel=2,
        )
    if report is not None:
        for each in reports:
            report(each)
    return model


def _synchronise(layers: Iterable[tuple[str, torch.nn.Module]], group: Any) -> None:
    """Let layers of one process become layers of a group; warn of those that cannot."""
    left = []
    for name, module in layers:
        before = type(module)
        _exchange(module, _SYNCHRONISED.get)
        if type(module) is not before:
            module.process_group = group
            module.__dict__["_alone"] = before
        elif not isinstance(module, SyncBatchNorm | torch.nn.SyncBatchNorm):
            left.append(f"\n  {name or 'the model itself'}: {class_name(before)}")
    if left:
        warnings.warn(
            f"not synchronised, as only BatchNorm1d, 2d and 3d can be:{''.join(left)}",
            ConversionWarning,
            stacklevel=3,
        )


def _report(name: str, module: torch.nn.Module, before: str, outcome: Outcome) -> LayerReport:
    after = class_name(type(module))
    if not _is_ours(module):
        return LayerReport(name, before, after, False, why_left(module))
    return LayerReport(name, before, after, *outcome, module.arithmetic)


def _alone(module: torch.nn.Module, reason: str) -> Outcome:
    """Return what a layer that is not fused by this conversion computes in one pass.

    `reason` says why the conversion did not fuse it; it is empty if nothing was to be fused.
    """
    activation = getattr(module, "activation", None)
    if isinstance(activation, Activation):
        return Outcome(True, str(activation))
    if not reason:
        return Outcome(False, "")
    if isinstance(module, _BatchNormReLU):
        return Outcome(True, "a ReLU of its own")
    if isinstance(module, Activated):
        why = module.why_not_fused() if module.at_once else reason
        return Outcome(True, "its own activation") if why is None else Outcome(False, why)
    return Outcome(False, "its statistics are constants" if isinstance(module, Frozen) else reason)


def revert(model: Model) -> Model:
    """Undo `convert`: PyTorch computes the batch normalisation of a model again.

    Parameters
    ----------
    model : torch.nn.Module
        Converted or not. Modules of `backnorm.torch` that were there from the beginning become
        PyTorch's too, except for ``BatchNormReLU1d``, ``2d`` and ``3d``, which PyTorch has not.

    Returns
    -------
    torch.nn.Module
        `model`.
    """
    _check_model(model)
    unfuse(model)
    for module in model.modules():
        alone = module.__dict__.pop("_alone", None)
        if alone is not None:
            module.__class__ = alone
            del module.process_group
        if isinstance(module, SyncBatchNorm) or alone is not None:
            module.__dict__.pop("name", None)
        if _is_ours(module):
            _exchange(module, original_of)
            if not _is_ours(module):
                # PyTorch's layers have no such attribute.
                module.__dict__.pop("arithmetic", None)
                module.__dict__.pop("reproducible", None)
                module.__dict__.pop("at_once", None)
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            "model", "is no model", came=described(model), accepted="a torch.nn.Module"
        )


def _is_ours(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or original_of(type(module)) is not None


def _becomes(module: torch.nn.Module) -> Class:
    """Return the class that `convert` gives a module, as if it was not parametrised."""
    cls = type(module)
    base = ours_for(cls.__bases__[0]) if is_parametrized(module) else None
    return ours_for(cls) or base or cls


def _exchange(module: torch.nn.Module, other: Callable[[Class], Class | None]) -> None:
    """Give a module the class that `other` has for its own, if it has one."""
    cls = type(module)
    found, base = other(cls), other(cls.__bases__[0])
    if found is not None:
        module.__class__ = found
    elif base is not None and is_parametrized(module):
        # A class of the module's own, with properties for its parameters.
        namespace = {
            name: value
            for name, value in vars(cls).items()
            if name not in ("__dict__", "__weakref__")
        }
        module.__class__ = type(cls.__name__, (base,), namespace)
