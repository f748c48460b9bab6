"""Convert a model's layers of batch normalisation to backnorm's layers, and back."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.scalars import check_flag
from backnorm.torch import modules, proof, tools
from backnorm.torch.fusion import (
    PairNames,
    check_fuse,
    fuse_pair,
    named_pairs,
    neighbours,
    refusal,
    separate,
)

Model = TypeVar("Model", bound=Module)

# Maps a library's module that defines layers to the module of backnorm that defines classes with
# the same names. backnorm's module for timm imports timm, so it is imported only if a model has a
# layer of timm. Likewise, backnorm's modules for torchvision and for its blocks are imported only
# if a model needs them.
_LIBRARIES = {
    "torch.nn.modules.batchnorm": "backnorm.torch.modules",
    "timm.layers.norm_act": "backnorm.torch.timm",
    "torchvision.ops.misc": "backnorm.torch.torchvision",
}
# Maps modules that define blocks of layers, in the same way. `convert` changes the classes of
# blocks only if its argument `fuse` is set.
_BLOCKS = {"torchvision.models.resnet": "backnorm.torch.resnet"}
_ORIGINALS = {ours: library for library, ours in (_LIBRARIES | _BLOCKS).items()}
_SYNCHRONISED = modules.BatchNorm1d, modules.BatchNorm2d, modules.BatchNorm3d
# The classes whose `arithmetic` can be set.
_OURS = modules._BatchNorm, modules.FrozenLayer
# The attribute with this name holds the class that a layer had before `sync` changed the class.
_CLASS_BEFORE_SYNC = "_class_before_sync"
_FOREIGN = (
    "its class is not PyTorch's own, and may do something else; if it does not, use PyTorch's class"
)
_NOT_IN_SEQUENCE = (
    "no plain torch.nn.Sequential has an activation behind it; name the pair if the model gives "
    "its output straight to an activation module"
)
# Attributes that `convert` sets and PyTorch's layers do not have.
_OWN_ATTRIBUTES = ("arithmetic", "reproducible", "fuse_activation")


class ConversionWarning(UserWarning):
    """`convert` found no layer to convert, or found layers that it cannot synchronise."""


@dataclass(frozen=True)
class LayerReport:
    """The result of `convert` for one layer of batch normalisation; ``str()`` makes it a line.

    Attributes
    ----------
    name : str
        The name of the layer in the model, as in `named_modules`: empty for the model itself.
    before, after : str
        The class of the layer, with the package that users import it from. The two are equal if the
        class was not changed.
    fused : bool
        Whether the layer also computes an activation.
    reason : str
        The operations fused with the layer, or the reason why it was not converted or not fused.
        Empty for a converted layer that is not fused, if `fuse` is False.
    arithmetic : {"float32", "float64"} or None
        The attribute `arithmetic` of the layer.
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
    example: Any = None,
    arithmetic: Arithmetic | None = None,
    sync: bool = False,
    process_group: Any = None,
    reproducible: bool | None = None,
) -> Model:
    """Let backnorm compute the batch normalisation of a model.

    Every `torch.nn.BatchNorm1d`, `2d`, `3d` and `SyncBatchNorm` in `model`, including `model`
    itself, becomes a layer of `backnorm.torch` in place. The modules stay the same objects with the
    same parameters, buffers and hooks; only their class changes. The lazy forms of these layers are
    converted in the same way, and so are timm's `BatchNormAct2d` and `FrozenBatchNormAct2d` and
    torchvision's `FrozenBatchNorm2d`. Other subclasses of these classes are not changed.

    Parameters
    ----------
    model : torch.nn.Module
    fuse : bool or iterable of (str, str)
        Whether a layer also computes the activation that follows it. The activation is
        `torch.nn.ReLU`, `ReLU6`, `SiLU`, `Hardswish`, or `Hardtanh` from 0 to a number of at most
        eight binary digits. True: fuse neighbours in every `torch.nn.Sequential`, timm's layers,
        which have an activation of their own, and the layers of torchvision's `BasicBlock` and
        `Bottleneck`, the last of which also adds the identity. Pairs of names, as in
        `model.named_modules()`: fuse the named layers and activations, if `example` proves that
        the model passes the layer's result only to the activation, and calls the activation with
        nothing else. The layer of a pair gets an `activation`, and a `torch.nn.Identity` takes the
        place of the activation's module. Modules that have hooks, are parametrized, or occur more
        than once in the model are not fused; a pair with such a module is an error. Layers that are
        already fused stay so: `revert` separates them.
    report : callable, optional
        Called with a `LayerReport` for each layer of batch normalisation, in the order of
        `model.named_modules()`: ``report=print`` prints one line per layer,
        ``report=reports.append`` collects the reports.
    example : Tensor, tuple, list or dict, optional
        A batch that proves pairs: the input of the model, its positional arguments or its keyword
        arguments, on the model's device. Copies of the model make a training step in float64, with
        and without the pairs. Pairs that change an output, a gradient or a buffer are an error.
        Named pairs require an example; with True, it proves the neighbours.
    arithmetic : {"float32", "float64"}, optional
        The arithmetic of all these layers from now on (``layer.arithmetic``), including layers that
        were already backnorm's. None: layers that were already backnorm's keep their arithmetic;
        the others use `backnorm.arithmetic`.
    sync : bool
        Whether layers of `BatchNorm1d`, `2d` and `3d`, which normalise the batch of one process,
        become `SyncBatchNorm`, which normalises the batch of all processes of a group.
    process_group : torch.distributed.ProcessGroup, optional
        The group of the layers that `sync` changes. None: all processes.
    reproducible : bool, optional
        Whether the results of these layers in training have the same bits for every order of a
        channel's elements (``layer.reproducible``); with `sync`, also for any number of processes.
        Such layers take several times as long. None: each layer keeps its own setting.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ArgumentTypeError
        If an argument has a wrong type.
    ArgumentValueError
        If `arithmetic` is unknown, `process_group` is given without `sync`, a pair cannot be fused
        or is not proved, or the model cannot make a training step on `example`.

    Warns
    -----
    ConversionWarning
        With `sync`, for layers that cannot be synchronised.
    ConversionWarning
        If `model` has no layer of backnorm after the conversion.

    Notes
    -----
    A fused layer of a pair applies the activation even if only a part of the model is called. A
    hook that is registered on it later gets the activated values. While a module of a block of
    torchvision has a hook or another `forward`, torchvision's forward runs. `revert` undoes the
    conversion.
    """
    _check_model(model)
    fuse = check_fuse(fuse)
    if report is not None and not callable(report):
        raise ArgumentTypeError(
            "report",
            "must be callable, or None",
            came=described(report),
            accepted="print, for example",
        )
    if arithmetic is not None:
        arithmetic = check_arithmetic(arithmetic)
    if reproducible is not None:
        reproducible = check_flag("reproducible", reproducible)
    if not check_flag("sync", sync) and process_group is not None:
        raise ArgumentValueError(
            "process_group", "must be None without sync=True", came=described(process_group)
        )
    layers = {name: layer for name, layer in model.named_modules() if is_batch_norm(layer)}
    before = {name: _class_name(layer) for name, layer in layers.items()}
    classes = {layer: _namesake(layer, _LIBRARIES) for layer in layers.values()}
    if fuse:
        _prove(model, fuse, example)
    tools.register_with_opacus(modules._BatchNorm)
    for layer, cls in classes.items():
        if cls is not None:
            _set_class(layer, cls)
        if arithmetic is not None and isinstance(layer, _OURS):
            layer.arithmetic = arithmetic
        if reproducible is not None and isinstance(layer, modules._BatchNorm):
            layer.reproducible = reproducible
    if sync:
        _synchronise(layers, process_group)
    for name, layer in layers.items():
        if isinstance(layer, modules.SyncBatchNorm):
            layer.name = f"layer {name!r}" if name else "the model itself"
    names, obstacles = neighbours(model) if fuse is True else (fuse or [], {})
    for pair in named_pairs(model, names):
        fuse_pair(pair)
    outcomes = {layer: (False, reason) for layer, reason in obstacles.items()}
    outcomes |= _fuse_blocks(model, fuse is True)
    reports = [
        LayerReport(name, before[name], _class_name(layer), *_outcome(layer, fuse, outcomes))
        for name, layer in layers.items()
    ]
    if not any(isinstance(layer, _OURS) for layer in layers.values()):
        if reports:
            lines = "".join(f"\n  {line}" for line in reports)
            reason = f"the model has no batch normalisation that can be converted; it has{lines}"
        else:
            reason = (
                "no module of the model is a layer of batch normalisation; functional.batch_norm, "
                "layers in plain lists and exported programs are not converted"
            )
        warnings.warn(f"nothing was converted: {reason}", ConversionWarning, stacklevel=2)
    if report is not None:
        for layer_report in reports:
            report(layer_report)
    return model


def revert(model: Model) -> Model:
    """Undo `convert`: replace backnorm's layers in a model by PyTorch's own layers.

    Parameters
    ----------
    model : torch.nn.Module
        Converted or not. Layers of `backnorm.torch` that the model was built with are also replaced
        by PyTorch's, except layers with an activation of their own, which PyTorch does not have.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ArgumentTypeError
        If `model` is not a `torch.nn.Module`, or is compiled by `torch.jit`.
    ArgumentValueError
        If `model` is a part of a model that has a fused layer, but not the `Identity` behind it.
    """
    _check_model(model)
    separate(model)
    for module in model.modules():
        if isinstance(module, modules.SyncBatchNorm):
            module.__dict__.pop("name", None)
        single = module.__dict__.pop(_CLASS_BEFORE_SYNC, None)
        if single is not None:
            _set_class(module, single)
            del module.process_group
        original = original_of(module)
        if original is not None:
            _set_class(module, original)
            for name in _OWN_ATTRIBUTES:
                module.__dict__.pop(name, None)
    return model


def original_of(layer: Module) -> type[Module] | None:
    """Return the class of PyTorch, timm or torchvision that a layer of backnorm replaces, or None.

    The result is None for a layer with an activation of its own, because PyTorch has no such class.
    """
    has_activation = getattr(layer, "activation", None) is not None
    return None if has_activation else _namesake(layer, _ORIGINALS)


def _check_model(model: object) -> None:
    if not isinstance(model, Module):
        raise ArgumentTypeError("model", "must be a torch.nn.Module", came=described(model))
    if isinstance(model, torch.jit.ScriptModule):
        raise ArgumentTypeError(
            "model",
            "must not be compiled by torch.jit, because the layers of its program cannot change",
            came=type(model).__name__,
            hint="pass the model that it was compiled from",
        )


def is_batch_norm(module: Module) -> bool:
    """Whether a module's class is PyTorch's batch normalisation, or has "batchnorm" in its name."""
    return (
        isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        or "batchnorm" in type(module).__name__.lower()
    )


def _namesake(layer: Module, libraries: Mapping[str, str]) -> type[Module] | None:
    """Return the class in another module that has the name of the layer's class, or None.

    `libraries` maps the module that defines the layer's class to the other module.
    """
    cls = type_before_parametrizations(layer)
    if cls.__module__ not in libraries:
        return None
    return getattr(importlib.import_module(libraries[cls.__module__]), cls.__name__, None)


def _set_class(module: Module, cls: type[Module]) -> None:
    """Change the class of a module.

    A parametrised module has a class of its own, whose properties are the module's parameters. The
    new class of such a module is a subclass of `cls` that has the properties of the old class.
    """
    if is_parametrized(module):
        cls = type(type(module).__name__, (cls,), dict(vars(type(module))))
    module.__class__ = cls


def _prove(model: Module, fuse: bool | list[PairNames], example: Any) -> None:
    """Raise unless the pairs of a model leave the results of a training step on `example` equal."""
    if example is None:
        if isinstance(fuse, list):
            raise ArgumentValueError(
                "example",
                "must be given with named pairs: convert(model, fuse=[...], example=batch) runs "
                "the model before and after, in float64 and in training, and refuses the pairs "
                "that change a result",
                came="None",
            )
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConversionWarning)
        plain = convert(proof.copied(model).double(), arithmetic="float64")
    proof.vary(plain)
    names = fuse if isinstance(fuse, list) else neighbours(plain)[0]
    # This call raises for names of modules that cannot be fused.
    named_pairs(plain, names)
    expected = proof.results_of(plain, example)

    def is_wrong(names: list[PairNames]) -> bool:
        fused = proof.copied(plain)
        for pair in named_pairs(fused, names):
            fuse_pair(pair)
        return not proof.agree(proof.results_of(fused, example), expected)

    if names and is_wrong(names):
        wrong = [pair for pair in names if is_wrong([pair])] or names
        raise refusal(wrong, "a training step on the example then has other results")


def _synchronise(layers: dict[str, Module], group: Any) -> None:
    """Turn layers into synchronised layers; warn of layers that cannot be synchronised."""
    others = []
    for name, layer in layers.items():
        cls = type_before_parametrizations(layer)
        if cls in _SYNCHRONISED:
            _set_class(layer, modules.SyncBatchNorm)
            layer.__dict__[_CLASS_BEFORE_SYNC] = cls
            layer.process_group = group
        elif not isinstance(layer, modules.SyncBatchNorm | torch.nn.SyncBatchNorm):
            others.append(f"\n  {name or 'the model itself'}: {_class_name(layer)}")
    if others:
        warnings.warn(
            f"not synchronised, as only BatchNorm1d, 2d and 3d can be:{''.join(others)}",
            ConversionWarning,
            stacklevel=3,
        )


def _fuse_blocks(model: Module, fuse: bool) -> dict[Module, tuple[bool, str]]:
    """If `fuse` is true, let residual blocks (`_BLOCKS`) fuse their layers, and timm's layers their
    activation. Return, for each of these layers, whether it is fused, and a text: what it is fused
    with, or why it is not fused.
    """
    outcomes = dict[Module, tuple[bool, str]]()
    for module in model.modules():
        cls = _namesake(module, _BLOCKS) if fuse else None
        if cls is not None:
            _set_class(module, cls)
        if fuse and hasattr(module, "fuse_activation"):
            module.fuse_activation = True
        if hasattr(module, "layer_outcomes"):
            outcomes |= module.layer_outcomes()
    return outcomes


def _class_name(module: Module) -> str:
    """Return the name of a module's class, with the package that users import it from.

    For a parametrised module (`torch.nn.utils.parametrize`), this is the name of the class that it
    had before parametrisation.
    """
    cls = type_before_parametrizations(module)
    package = re.sub(r"^torch\.nn\.modules\..*", "torch.nn", cls.__module__)
    package = re.sub(r"^backnorm\.torch\.modules$", "backnorm.torch", package)
    return f"{package}.{cls.__qualname__}"


def _outcome(
    layer: Module, fuse: object, outcomes: Mapping[Module, tuple[bool, str]]
) -> tuple[bool, str, Arithmetic | None]:
    """Return the attributes `fused`, `reason` and `arithmetic` of a `LayerReport`."""
    if type_before_parametrizations(layer) is torch.nn.SyncBatchNorm:
        return False, "it normalises over several processes", None
    if not isinstance(layer, _OURS):
        return False, _FOREIGN, None
    activation = getattr(layer, "activation", None)
    if activation is not None:
        own = " of its own" if layer.fused is None else ""
        return True, modules.described_activation(activation) + own, layer.arithmetic
    reason = _NOT_IN_SEQUENCE if fuse is True else "no pair names it"
    if isinstance(layer, modules.FrozenLayer):
        reason = "its statistics are constants"
    is_fused, reason = outcomes.get(layer, (False, reason))
    return is_fused, reason if is_fused or fuse else "", layer.arithmetic
