"""`convert` and `revert`: the layers of batch normalisation of a whole model, there and back."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn import Module

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.scalars import check_flag
from backnorm.torch import modules, tools
from backnorm.torch.fusion import check_fuse, fuse_pair, fuse_sequences, named_pairs, unfuse
from backnorm.torch.library_layers import (
    FrozenLayer,
    LayerClass,
    LayerWithActivation,
    class_for,
    is_batch_norm,
    original_of,
    replacement_of,
)
from backnorm.torch.separable import described_activation

__all__ = ["ConversionWarning", "LayerReport", "convert", "revert"]

Model = TypeVar("Model", bound=Module)

_SYNCHRONISED: dict[LayerClass, LayerClass] = dict.fromkeys(
    (modules.BatchNorm1d, modules.BatchNorm2d, modules.BatchNorm3d), modules.SyncBatchNorm
)
# The classes whose `arithmetic` can be set.
_OURS = modules._BatchNorm, FrozenLayer
# The attribute of a layer that `sync` changed: the class of the layer before.
_CLASS_BEFORE_SYNC = "_class_before_sync"
# Attributes that `convert` sets and PyTorch's layers do not have.
_OWN_ATTRIBUTES = ("arithmetic", "reproducible", "fuse_activation")


class ConversionWarning(UserWarning):
    """A model has no layer that `convert` can convert, or a layer that it cannot synchronise."""


@dataclass(frozen=True)
class LayerReport:
    """What `convert` did with one layer of batch normalisation; ``str()`` makes a line of it.

    Attributes
    ----------
    name : str
        The name of the layer in the model, as in `named_modules`: empty for the model itself.
    before, after : str
        The class of the layer, with the package that users import it from. They are equal for a
        layer that stays as it is, and for one that was backnorm's before.
    fused : bool
        Whether the layer computes an activation in the same pass.
    reason : str
        The activation, or the reason why the layer was not converted or not fused. Empty for a
        layer that is converted without `fuse`.
    arithmetic : {"float32", "float64"} or None
        The layer's own `arithmetic`.
    """

    name: str
    before: str
    after: str
    fused: bool
    reason: str
    arithmetic: Arithmetic | None = None

    def __str__(self) -> str:
        name = self.name or "the model itself"
        if not self.after.startswith("backnorm."):
            return f"{name}: {self.before}, left as it is: {self.reason}"
        classes = self.after if self.before == self.after else f"{self.before} -> {self.after}"
        arithmetic = "" if self.arithmetic is None else f" in {self.arithmetic}"
        outcome = "fused with" if self.fused else "not fused:"
        return f"{name}: {classes}{arithmetic}" + (self.reason and f", {outcome} {self.reason}")


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
    """Let backnorm compute the batch normalisation of a model.

    Every `torch.nn.BatchNorm1d`, `2d`, `3d` and `SyncBatchNorm` in `model`, including `model`
    itself, becomes a layer of `backnorm.torch` in place: the modules stay the same objects with the
    same parameters, buffers and hooks, and only their class changes. The same holds for their lazy
    forms, for timm's `BatchNormAct2d` and `FrozenBatchNormAct2d`, and for torchvision's
    `FrozenBatchNorm2d`. Other subclasses stay as they are.

    Parameters
    ----------
    model : torch.nn.Module
    fuse : bool or iterable of (str, str)
        Whether a layer computes the activation that follows it, in one pass each way:
        `torch.nn.ReLU`, `ReLU6`, `Hardtanh` from 0 to a number of at most eight binary digits,
        `SiLU`, `Hardswish`. True: in every `torch.nn.Sequential`, and in timm's layers, which have
        an activation of their own. Pairs of names, as in `model.named_modules()`: the named layers
        and activations. The caller then guarantees that the forward calls the activation with the
        result of the layer, and uses neither of them for anything else. The layer gets an
        `activation`, and the module of the activation becomes a `torch.nn.Identity` in its place.
        Modules with hooks, or with more than one place in the model, are not fused; a pair with
        such a module is an error.
    report : callable, optional
        Called with a `LayerReport` for each layer of batch normalisation, in the order of
        `model.named_modules()`: ``report=print`` prints a line a layer,
        ``report=reports.append`` collects the reports.
    arithmetic : {"float32", "float64"}, optional
        The arithmetic of all these layers from now on (``layer.arithmetic``), including layers
        that were backnorm's before. None: a layer of backnorm keeps its own, and the calls of other
        layers use `backnorm.arithmetic`.
    sync : bool
        Whether layers of `BatchNorm1d`, `2d` and `3d`, which normalise the batch of one process,
        become `SyncBatchNorm`, which normalises the batch of all processes of a group.
    process_group : torch.distributed.ProcessGroup, optional
        The group of the layers that `sync` changes. None: all processes.
    reproducible : bool, optional
        Whether the results of these layers in training have the same bits for every division of
        the batch (``layer.reproducible``), with `sync` for any number of processes. None: each
        layer keeps its own setting.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ArgumentTypeError
        If an argument has another type.
    ArgumentValueError
        If `arithmetic` has another value, a process group comes without `sync`, or a pair of names
        cannot be fused.

    Warns
    -----
    ConversionWarning
        With `sync`, for layers that cannot be synchronised.
    ConversionWarning
        If `model` has no layer of backnorm after the conversion.

    Notes
    -----
    A hook that is registered later on a fused layer or its activation, or another `forward` for
    one of them, separates the two: each computes what it did before `convert`. The result of a
    fused layer contains the activation even where the activation's module is not called, as in a
    part of a sequence. `revert` undoes everything.
    """
    _check_model(model)
    fuse = check_fuse(fuse)
    if report is not None and not callable(report):
        raise ArgumentTypeError("report", "must be callable, or None", came=described(report))
    if arithmetic is not None:
        arithmetic = check_arithmetic(arithmetic)
    if reproducible is not None:
        reproducible = check_flag("reproducible", reproducible)
    if not check_flag("sync", sync) and process_group is not None:
        raise ArgumentValueError(
            "process_group", "must be None without sync=True", came=described(process_group)
        )
    pairs = named_pairs(model, fuse) if isinstance(fuse, list) else []
    tools.register_with_opacus(modules._BatchNorm)
    layers = {name: layer for name, layer in model.named_modules() if is_batch_norm(layer)}
    classes = {name: _class_name(layer) for name, layer in layers.items()}
    for layer in layers.values():
        _change_class(layer, replacement_of)
        if fuse is True and isinstance(layer, LayerWithActivation):
            layer.fuse_activation = True
        if arithmetic is not None and isinstance(layer, _OURS):
            layer.arithmetic = arithmetic
        if reproducible is not None and isinstance(layer, modules._BatchNorm):
            layer.reproducible = reproducible
    if sync:
        _synchronise(layers, process_group)
    for name, layer in layers.items():
        if isinstance(layer, modules.SyncBatchNorm):
            layer.name = f"layer {name!r}" if name else "the model itself"
    obstacles = fuse_sequences(model) if fuse is True else {}
    for pair in pairs:
        fuse_pair(pair)
    reports = [
        _report(name, classes[name], layer, _obstacle(layer, fuse, obstacles))
        for name, layer in layers.items()
    ]
    if not any(isinstance(layer, _OURS) for layer in layers.values()):
        lines = "".join(f"\n  {line}" for line in reports)
        warnings.warn(
            "nothing was converted: the model has no batch normalisation"
            + (lines and f" that can be converted; it has{lines}"),
            ConversionWarning,
            stacklevel=2,
        )
    if report is not None:
        for layer_report in reports:
            report(layer_report)
    return model


def revert(model: Model) -> Model:
    """Undo `convert`: PyTorch computes the batch normalisation of a model again.

    Parameters
    ----------
    model : torch.nn.Module
        Converted or not. Layers of `backnorm.torch` that the model was built with become PyTorch's
        too, except for ``BatchNormReLU1d``, ``2d`` and ``3d``, which PyTorch does not have.

    Returns
    -------
    torch.nn.Module
        `model`.
    """
    _check_model(model)
    unfuse(model)
    for module in model.modules():
        if isinstance(module, modules.SyncBatchNorm):
            module.__dict__.pop("name", None)
        single = module.__dict__.pop(_CLASS_BEFORE_SYNC, None)
        if single is not None:
            _change_class(module, {modules.SyncBatchNorm: single}.get)
            del module.process_group
        if isinstance(module, _OURS) and _change_class(module, original_of):
            for name in _OWN_ATTRIBUTES:
                module.__dict__.pop(name, None)
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, Module):
        raise ArgumentTypeError("model", "must be a torch.nn.Module", came=described(model))


def _change_class(module: Module, counterpart: Callable[[LayerClass], LayerClass | None]) -> bool:
    """Give a module the counterpart of its class, if there is one; return whether there is."""
    cls = type(module)
    replacement = class_for(module, counterpart)
    if replacement is cls:
        return False
    module.__class__ = replacement
    return True


def _synchronise(layers: dict[str, Module], group: Any) -> None:
    """Turn layers of one process into layers of a group; warn of those that cannot be."""
    others = []
    for name, layer in layers.items():
        single = next((cls for cls in type(layer).__mro__ if cls in _SYNCHRONISED), None)
        if _change_class(layer, _SYNCHRONISED.get):
            layer.process_group = group
            layer.__dict__[_CLASS_BEFORE_SYNC] = single
        elif not isinstance(layer, modules.SyncBatchNorm | torch.nn.SyncBatchNorm):
            others.append(f"\n  {name or 'the model itself'}: {_class_name(layer)}")
    if others:
        warnings.warn(
            f"not synchronised, as only BatchNorm1d, 2d and 3d can be:{''.join(others)}",
            ConversionWarning,
            stacklevel=3,
        )


def _class_name(module: Module) -> str:
    """Return the name of a module's class, with the package that users import it from."""
    cls = type(module)
    package = re.sub(r"^torch\.nn\.modules\..*", "torch.nn", cls.__module__)
    package = re.sub(r"^backnorm\.torch\.modules$", "backnorm.torch", package)
    return f"{package}.{cls.__qualname__}"


def _report(name: str, before: str, layer: Module, obstacle: str) -> LayerReport:
    after = _class_name(layer)
    if isinstance(layer, _OURS):
        activation = _fused_activation(layer)
        reason = obstacle if activation is None else activation
        return LayerReport(name, before, after, activation is not None, reason, layer.arithmetic)
    if isinstance(layer, torch.nn.SyncBatchNorm):
        reason = "it normalises over several processes"
    else:
        reason = "its class is not PyTorch's own, and may do something else"
    return LayerReport(name, before, after, False, reason)


def _fused_activation(layer: Module) -> str | None:
    """Return the activation that a layer computes in the same pass as a phrase, or None."""
    if isinstance(layer, modules._BatchNormReLU):
        return "a ReLU of its own"
    if isinstance(layer, LayerWithActivation):
        return "its own activation" if layer.fusion_obstacle() is None else None
    activation = getattr(layer, "activation", None)
    return None if activation is None else described_activation(activation)


def _obstacle(layer: Module, fuse: object, obstacles: dict[Module, str]) -> str:
    """Return the reason why a layer was not fused; empty if no fusion was requested."""
    if not fuse:
        return ""
    if isinstance(layer, FrozenLayer):
        return "its statistics are constants"
    if isinstance(layer, LayerWithActivation):
        return layer.fusion_obstacle() or ""
    if fuse is True:
        return obstacles.get(layer, "it is not in a torch.nn.Sequential; a pair can be named")
    return "no pair names it"
