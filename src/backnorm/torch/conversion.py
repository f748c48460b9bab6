"""A whole model, there and back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from backnorm.torch import fusion, modules
from backnorm.torch.fusion import FusionWarning
from backnorm.torch.tracing import CONTAINERS, UntraceableError

__all__ = ["FusionWarning", "convert", "revert"]

Model = TypeVar("Model", bound=torch.nn.Module)
Class = type[torch.nn.Module]

_OURS: dict[Class, Class] = {
    torch.nn.BatchNorm1d: modules.BatchNorm1d,
    torch.nn.BatchNorm2d: modules.BatchNorm2d,
    torch.nn.BatchNorm3d: modules.BatchNorm3d,
}
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


def convert(model: Model, fuse: bool = False) -> Model:
    """Have backnorm compute the batch normalisation of a model.

    Every `torch.nn.BatchNorm1d`, `2d` and `3d` in `model`, itself included, becomes one of
    `backnorm.torch`, in place: the modules stay the same objects with the same parameters, buffers
    and hooks, and only their class changes. Subclasses of other behaviour stay as they are (as do
    `SyncBatchNorm` and lazy modules whose first batch has not come).

    Parameters
    ----------
    model : torch.nn.Module
    fuse : bool
        Whether to compute normalisation, a following addition and a following ReLU
        (`torch.nn.ReLU`, `relu` as function or method) in one pass each way. They are looked for in
        `torch.nn.Sequential` and in the forward of every module that holds normalisation, by
        `torch.fx`. The module's forward is then replaced by a graph, which runs as long as what
        the forward looks at (plain attributes, training or not) is what it was, and only for
        positional tensors; otherwise the forward itself does. A layer with hooks is not fused.

    Returns
    -------
    torch.nn.Module
        `model`.

    Warns
    -----
    FusionWarning
        With `fuse`, for modules with normalisation whose forward is not a graph (it branches on
        values, say): they are converted, not fused.

    Notes
    -----
    A fused module keeps its type's name and is an instance of its type; pickled and copied, it is
    fused in the copy. `revert` undoes everything.
    """
    for module in model.modules():
        _exchange(module, _OURS)
    if fuse:
        failures = []
        for name, module in model.named_modules():
            if not _normalises(module):
                continue
            try:
                fusion.fuse(module)
            except UntraceableError as error:
                failures.append(f"{name or 'the model itself'} ({error})")
        if failures:
            warnings.warn(
                f"not fused, because it is not a graph: {'; '.join(failures)}",
                FusionWarning,
                stacklevel=2,
            )
    return model


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
    for module in model.modules():
        fusion.unfuse(module)
        _exchange(module, _THEIRS)
    return model


def _exchange(module: torch.nn.Module, classes: dict[Class, Class]) -> None:
    """Give a module the class that stands for its own in `classes`, if one does."""
    cls = type(module)
    if cls in classes:
        module.__class__ = classes[cls]
    elif is_parametrized(module) and cls.__bases__[0] in classes:
        # A class of the module's own, with properties for its parameters.
        namespace = {
            name: value
            for name, value in vars(cls).items()
            if name not in ("__dict__", "__weakref__")
        }
        module.__class__ = type(cls.__name__, (classes[cls.__bases__[0]],), namespace)


def _normalises(module: torch.nn.Module) -> bool:
    """Whether a module's own forward calls batch normalisation: its child, or in a list of them."""
    return any(type(child) in _THEIRS for child in _called(module))


def _called(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if isinstance(module, CONTAINERS) and not isinstance(module, torch.nn.Sequential):
        return
    pending = list(module.children())
    while pending:
        child = pending.pop()
        yield child
        if isinstance(child, CONTAINERS) and not isinstance(child, torch.nn.Sequential):
            pending += child.children()
