"""Modules that run a fused graph instead of their own forward, and stay what they are.

A module whose forward has a ReLU after a normalisation is given a subclass of its class, of the
same name, whose forward runs the fused graph as long as it is the same as the forward of the class.
The module's identity, its children, parameters, hooks and state_dict do not change.
"""

from __future__ import annotations

import copyreg
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from backnorm.torch import patterns
from backnorm.torch.patterns import Outcome
from backnorm.torch.tracing import Trace, UntraceableError, traces

__all__ = ["FusionWarning", "fuse", "is_fused", "unfuse"]

_STATE = "_backnorm_fused"


class FusionWarning(UserWarning):
    """Modules that normalise, in which could not be looked for what can be fused."""


@dataclass(frozen=True)
class _Fused:
    """The fused graph of a forward, as a function of the module and its inputs."""

    trace: Trace
    run: Callable[..., Any]


class _FusedForward:
    """What is put before a module's class, beside a forward."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Leave the graphs out: they are found again in a copy."""
        reduced: Any = super().__reduce_ex__(protocol)
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        _, (cls, *arguments), state, *rest = reduced
        if isinstance(state, dict):
            state = {name: value for name, value in state.items() if name != _STATE}
        return _rebuild, (cls.__bases__[1], *arguments), state, *rest

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        try:
            fuse(self)
        except UntraceableError as error:
            # Its class is another one than when it was fused.
            warnings.warn(f"not fused again: {error}", FusionWarning, stacklevel=2)


def fuse(module: torch.nn.Module) -> dict[str, Outcome]:
    """Fuse the forward of one module (not of its children).

    Returns what became of each layer that the forward calls, by name.

    Raises
    ------
    UntraceableError
        If the forward is not a graph.
    """
    unfuse(module)
    training = module.training
    found: list[_Fused] = []
    outcomes: dict[str, Outcome] = {}
    try:
        for mode in (training, not training):
            module.__dict__["training"] = mode
            traced = traces(module, lambda sequence: patterns.last_norm(sequence) is not None)
            for one in traced:
                became = patterns.fuse(one.graph, module, lists=one.kind is list)
                if any(each.fused for each in became.values()):
                    graph_module = fx.GraphModule(module, one.graph)
                    found.append(_Fused(one, type(graph_module).forward))
                # Of a layer that is fused in one mode alone, that is what is said.
                outcomes |= {
                    name: each
                    for name, each in became.items()
                    if each.fused or name not in outcomes
                }
            if not any("training" in one.attributes for one in traced):
                break
    finally:
        module.__dict__["training"] = training
    if found:
        module.__class__ = _fused_class(type(module))
        module.__dict__[_STATE] = tuple(found)
    return outcomes


def unfuse(module: torch.nn.Module) -> None:
    """Give a module its own forward back; does nothing to one that was not fused."""
    if is_fused(module):
        module.__class__ = type(module).__bases__[1]
        module.__dict__.pop(_STATE, None)


def is_fused(module: torch.nn.Module) -> bool:
    """Whether `fuse` fused something in the forward of `module`."""
    return type(module).__bases__[0] is _FusedForward


# Made once: copies of a module are of one class.
_classes: dict[Any, Any] = {}


def _fused_class(cls: Any) -> Any:
    """Return the class of fused modules of `cls`."""
    if cls not in _classes:
        _classes[cls] = _make_class(cls)
    return _classes[cls]


def _make_class(cls: Any) -> Any:
    original = cls.forward

    @functools.wraps(original)
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            for fused in self.__dict__.get(_STATE, ()):
                if fused.trace.takes(args) and fused.trace.holds(self):
                    return fused.run(self, *args)
        return original(self, *args, **kwargs)

    namespace = {
        "forward": forward,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_backnorm_unfused": cls,
    }
    return type(cls.__name__, (_FusedForward, cls), namespace)


def _rebuild(cls: type[torch.nn.Module], *arguments: Any) -> torch.nn.Module:
    """Return an empty copy of a fused module; its state comes after."""
    fused = _fused_class(cls)
    return fused.__new__(fused, *arguments)
