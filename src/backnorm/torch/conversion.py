"""A whole model, there and back."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from backnorm.arithmetics import Arithmetic, check_arithmetic
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described
from backnorm.scalars import check_flag
from backnorm.torch import fusion, tools
from backnorm.torch.counterparts import Class, original_of, ours_for
from backnorm.torch.fusion import FusionWarning
from backnorm.torch.kinds import Activated, Frozen, is_activated_alone
from backnorm.torch.modules import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    SyncBatchNorm,
    _BatchNorm,
    _BatchNormReLU,
)
from backnorm.torch.patterns import FUSABLE, Outcome, last_norm
from backnorm.torch.report import LayerReport, class_name, is_batch_norm, why_left
from backnorm.torch.steps import is_observed
from backnorm.torch.tracing import CONTAINERS, UntraceableError

__all__ = ["ConversionWarning", "FusionWarning", "convert", "revert"]

Model = TypeVar("Model", bound=torch.nn.Module)

_SYNCHRONISED: dict[Class, Class] = dict.fromkeys(
    (BatchNorm1d, BatchNorm2d, BatchNorm3d), SyncBatchNorm
)


class ConversionWarning(UserWarning):
    """A model has nothing that `convert` can convert."""


def convert(
    model: Model,
    fuse: bool = False,
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
    fuse : bool
        Whether to compute normalisation, a following addition and a following ReLU
        (`torch.nn.ReLU`, `relu` as function or method; `torch.nn.ReLU6`, `relu6`, and `Hardtanh` or
        `hardtanh` from 0 to a number of at most eight binary digits) in one pass each way. They are
        looked for in `torch.nn.Sequential` and in the forward of every module that holds
        normalisation, or a sequence that ends in it, by `torch.fx`. The module's forward is then
        replaced by a graph, which runs as long as what the forward looks at (plain attributes,
        training or not) is what it was, and only for positional tensors; otherwise the forward
        itself does. A layer is not fused if it has hooks, or where something could see its running
        statistics too early. Of normalisation and a following SiLU or Hardswish the normalised
        values are not kept.
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
        If the arithmetic is neither, or a process group comes without `sync`.

    Warns
    -----
    ConversionWarning
        With `sync`, for layers that stay layers of one process.
    ConversionWarning
        If nothing in `model` can be converted, and nothing was.
    FusionWarning
        With `fuse`, for modules with normalisation whose forward is not a graph (it branches on
        values, say): they are converted, not fused.

    Notes
    -----
    A fused module keeps its type's name and is an instance of its type; pickled and copied, it is
    fused in the copy. `revert` undoes everything.
    """
    _check_model(model)
    fuse, sync = check_flag("fuse", fuse), check_flag("sync", sync)
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
    layers = [(name, module) for name, module in model.named_modules() if is_batch_norm(module)]
    before = [class_name(type(module)) for _, module in layers]
    for _, module in layers:
        _exchange(module, functools.partial(ours_for, fuse=fuse and is_activated_alone(module)))
        if arithmetic is not None and _is_ours(module):
            module.arithmetic = arithmetic
        if reproducible is not None and isinstance(module, _BatchNorm):
            module.reproducible = reproducible
    if sync:
        _synchronise(layers, process_group)
    for name, module in layers:
        if isinstance(module, SyncBatchNorm):
            module.name = f"layer {name!r}" if name else "the model itself"
    outcomes = _fuse(model) if fuse else {}
    reports = [
        _report(name, module, earlier, fuse, outcomes.get(module))
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


def _fuse(model: torch.nn.Module) -> dict[torch.nn.Module, Outcome]:
    """Fuse what can be fused, and say what became of layers that something calls."""
    outcomes: dict[torch.nn.Module, Outcome] = {}
    failures = []
    for name, module in model.named_modules():
        if not _normalises(module):
            continue
        name = name or "the model itself"
        try:
            found = {
                module.get_submodule(path): outcome for path, outcome in fusion.fuse(module).items()
            }
        except UntraceableError as error:
            failures.append(f"{name} ({error})")
            reason = f"the forward of {name} is not a graph: {error}"
            found = dict.fromkeys(_called(module), Outcome(False, reason))
        for layer, outcome in found.items():
            if outcome.fused and is_observed(layer):
                outcome = Outcome(False, "it has hooks; it will be once they are gone")
            if layer not in outcomes or outcome.fused:
                outcomes[layer] = outcome
    if failures:
        warnings.warn(
            f"not fused, because it is not a graph: {'; '.join(failures)}",
            FusionWarning,
            stacklevel=3,
        )
    return outcomes


def _report(
    name: str, module: torch.nn.Module, before: str, fuse: bool, outcome: Outcome | None
) -> LayerReport:
    after = class_name(type(module))
    if not _is_ours(module):
        return LayerReport(name, before, after, False, why_left(module))
    arithmetic = module.arithmetic
    if not fuse:
        return LayerReport(name, before, after, False, "", arithmetic)
    fused, reason = outcome or _alone(module)
    return LayerReport(name, before, after, fused, reason, arithmetic)


def _alone(module: torch.nn.Module) -> Outcome:
    """Say what a layer that is in no graph computes in one pass."""
    if isinstance(module, _BatchNormReLU):
        return Outcome(True, "a ReLU of its own")
    if isinstance(module, Activated):
        reason = module.why_not_fused()
        return Outcome(True, "its own activation") if reason is None else Outcome(False, reason)
    if isinstance(module, Frozen):
        return Outcome(False, "its statistics are constants")
    return Outcome(False, "the module that holds it does not call it")


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
    for module in model.modules():
        fusion.unfuse(module)
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
    return model


def _check_model(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            "model", "is no model", came=described(model), accepted="a torch.nn.Module"
        )


def _is_ours(module: torch.nn.Module) -> bool:
    return isinstance(module, _BatchNorm) or original_of(type(module)) is not None


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


def _normalises(module: torch.nn.Module) -> bool:
    """Whether a module's own forward calls batch normalisation, or a sequence that ends in it."""
    return any(type(child) in FUSABLE for child in _called(module))


def _called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, CONTAINERS) and not isinstance(module, torch.nn.Sequential):
        return
    pending = list(module.children())
    while pending:
        child = pending.pop()
        yield child
        if not isinstance(child, CONTAINERS):
            continue
        if not isinstance(child, torch.nn.Sequential):
            pending += child.children()
        elif (layer := last_norm(child)) is not None:
            yield layer
