"""What a fused graph calls: layer, addition and activation in one, where nobody can tell.

A graph calls `begin` in the layer's place and `finish` in the activation's. Normally `begin`
computes everything. Where something has changed since the graph was made (hooks, layers), it calls
the layer alone, and `finish` does the rest. `passed` are the layer and what comes between it and
the activation and does nothing, `torch.nn.Identity`; `act` is a module, or where it is a function
an `Activation`.

If the residual is computed after the layer, the graph calls `defer` instead, and `finish` computes
everything; running statistics then move later than they would. So `defer` sees to it that nothing
that is called meanwhile looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from backnorm.torch.activations import Activation, activated, activation_of
from backnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm

__all__ = [
    "NORMS", "begin", "defer", "finish", "is_observed", "keeps_to_itself", "share_memory",
    "state_of",
]  # fmt: skip

NORMS = (BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm)

Layers: TypeAlias = tuple[torch.nn.Module, ...]

# Looked up once: these are asked in every call.
_is_alias_of = torch._C._is_alias_of
_KNOWN: set[type[torch.nn.Module]] = set()

# How far `begin` and `defer` have come.
_NORMALISED, _FINISHED, _DEFERRED = range(3)

# PyTorch's modules whose forward looks at nothing but their own attributes.
_FAMILIES = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        "activation", "batchnorm", "channelshuffle", "container", "conv", "dropout", "flatten",
        "fold", "instancenorm", "linear", "normalization", "padding", "pixelshuffle", "pooling",
        "upsampling",
    )
)  # fmt: skip
# What a subclass may have and still do what its base does.
_HARMLESS = frozenset(
    {
        "__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__parameters__",
        "__static_attributes__", "__firstlineno__", "__annotate_func__", "__annotations_cache__",
    }
)  # fmt: skip


def begin(
    passed: Layers, act: torch.nn.Module | Activation, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, int]:
    """Return act(norm(x) + residual), or norm(x) alone."""
    added = residual is not None
    if _can_be_one(passed, act, added) and (residual is None or _can_be_added(residual, x)):
        return _with_activation(passed, act, x, residual), _FINISHED
    return _call(passed, x), _NORMALISED


def defer(
    passed: Layers,
    act: torch.nn.Module | Activation,
    x: Tensor,
    called: Layers,
    inputs: tuple[Tensor | list[Tensor], ...],
) -> tuple[Tensor, int]:
    """Return x, if norm(x) can be computed later, after the modules `called`; or norm(x).

    `inputs` are those of the whole graph.
    """
    norm = passed[0]
    if (
        _can_be_one(passed, act, True)
        and all(keeps_to_itself(module, norm) for module in called)
        and not share_memory(_tensors_in(inputs), state_of(norm))
    ):
        return x, _DEFERRED
    return _call(passed, x), _NORMALISED


def finish(
    passed: Layers,
    act: torch.nn.Module | Activation,
    begun: tuple[Tensor, int],
    residual: Tensor | None,
    in_place: bool,
    act_in_place: bool,
) -> Tensor:
    """Do what is left to do."""
    y, stage = begun
    if stage == _FINISHED:
        return y
    if stage == _DEFERRED:
        assert residual is not None
        if _can_be_added(residual, y):
            return _with_activation(passed, act, y, residual)
        y = _call(passed, y)
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    if isinstance(act, torch.nn.Module):
        return act(y)
    return activated(y, act, in_place=act_in_place)


def is_observed(module: torch.nn.Module) -> bool:
    """Whether somebody wants to see what the module gets and gives."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def keeps_to_itself(module: torch.nn.Module, layer: torch.nn.Module) -> bool:
    """Whether a call of `module` is sure not to look at the state of `layer`."""
    state = state_of(layer)
    pending = [module]
    while pending:
        each = pending.pop()
        if (
            each is layer
            or "forward" in each.__dict__
            or not _has_forward_of_pytorch(type(each))
            or is_observed(each)
            or share_memory(state_of(each), state)
        ):
            return False
        pending += [child for child in each._modules.values() if child is not None]
    return True


def state_of(module: torch.nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, without those of its children."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether one of `some` has memory with one of `others`.

    A compiler knows only whether they are one tensor.
    """
    if is_compiling():
        return any(one is other for one in some for other in others)
    for one in some:
        for other in others:
            if _is_alias_of(one, other):
                return True
    return False


def _tensors_in(inputs: Sequence[Tensor | list[Tensor]]) -> list[Tensor]:
    return [one for each in inputs for one in (each if isinstance(each, list) else (each,))]


def _call(passed: Layers, x: Tensor) -> Tensor:
    for module in passed:
        x = module(x)
    return x


def _with_activation(
    passed: Layers, act: torch.nn.Module | Activation, x: Tensor, residual: Tensor | None
) -> Tensor:
    norm, activation = passed[0], _activation(act)
    assert isinstance(norm, NORMS)
    assert activation is not None
    return norm.with_activation(x, residual, activation)


def _activation(act: torch.nn.Module | Activation) -> Activation | None:
    return activation_of(act) if isinstance(act, torch.nn.Module) else act


def _can_be_one(passed: Layers, act: torch.nn.Module | Activation, added: bool) -> bool:
    norm, *nothing = passed
    activation = _activation(act)
    if activation is None or (added and isinstance(activation, str)):
        return False
    return (
        type(norm) in NORMS
        and not is_observed(norm)
        and not (isinstance(act, torch.nn.Module) and is_observed(act))
        and all(type(each) is torch.nn.Identity and not is_observed(each) for each in nothing)
    )


def _can_be_added(residual: Tensor, x: Tensor) -> bool:
    return residual.shape == x.shape and residual.dtype == x.dtype


def _has_forward_of_pytorch(cls: type[torch.nn.Module]) -> bool:
    """Whether what runs when a module is called is known: PyTorch's or ours."""
    # A fused module does what its class does.
    return cls in _KNOWN or _is_known(getattr(cls, "_backnorm_unfused", cls))


def _is_known(cls: type[torch.nn.Module]) -> bool:
    for each in cls.__mro__:
        if each in NORMS or each.__module__ in _FAMILIES:
            _KNOWN.add(cls)
            return True
        if not vars(each).keys() <= _HARMLESS:
            return False
    return False
