"""What a fused graph calls: layer, addition and ReLU in one, where nobody can tell.

A graph calls `begin` in the layer's place and `finish` in the ReLU's. Normally `begin` computes
everything. Where something has changed since the graph was made (hooks, layers), it calls the layer
alone, and `finish` does the rest. `passed` are the layer and what comes between it and the ReLU
and does nothing, `torch.nn.Identity`; `relu` is a module, or where it is a function its ceiling,
which is infinity for a ReLU without one.

If the residual is computed after the layer, the graph calls `defer` instead, and `finish` computes
everything; running statistics then move later than they would. So `defer` sees to it that nothing
that is called meanwhile looks at them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.compiler import is_compiling

from backnorm.torch.modules import BatchNorm1d, BatchNorm2d, BatchNorm3d, SyncBatchNorm
from backnorm.torch.rectifiers import ceiling_of, rectified

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
    passed: Layers, relu: torch.nn.Module | float, x: Tensor, residual: Tensor | None
) -> tuple[Tensor, int]:
    """Return relu(norm(x) + residual), or norm(x) alone."""
    if _can_be_one(passed, relu) and (residual is None or _can_be_added(residual, x)):
        return _with_relu(passed, relu, x, residual), _FINISHED
    return _call(passed, x), _NORMALISED


def defer(
    passed: Layers,
    relu: torch.nn.Module | float,
    x: Tensor,
    called: Layers,
    inputs: tuple[Tensor, ...],
) -> tuple[Tensor, int]:
    """Return x, if norm(x) can be computed later, after the modules `called`; or norm(x).

    `inputs` are those of the whole graph.
    """
    norm = passed[0]
    if (
        _can_be_one(passed, relu)
        and all(keeps_to_itself(module, norm) for module in called)
        and not share_memory(inputs, state_of(norm))
    ):
        return x, _DEFERRED
    return _call(passed, x), _NORMALISED


def finish(
    passed: Layers,
    relu: torch.nn.Module | float,
    begun: tuple[Tensor, int],
    residual: Tensor | None,
    in_place: bool,
    relu_in_place: bool,
) -> Tensor:
    """Do what is left to do."""
    y, stage = begun
    if stage == _FINISHED:
        return y
    if stage == _DEFERRED:
        assert residual is not None
        if _can_be_added(residual, y):
            return _with_relu(passed, relu, y, residual)
        y = _call(passed, y)
    if residual is not None:
        y = y.add_(residual) if in_place else y + residual
    if isinstance(relu, torch.nn.Module):
        return relu(y)
    return rectified(y, _finite(relu), in_place=relu_in_place)


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


def _call(passed: Layers, x: Tensor) -> Tensor:
    for module in passed:
        x = module(x)
    return x


def _with_relu(
    passed: Layers, relu: torch.nn.Module | float, x: Tensor, residual: Tensor | None
) -> Tensor:
    norm, ceiling = passed[0], _ceiling(relu)
    assert isinstance(norm, NORMS)
    assert ceiling is not None
    return norm.with_relu(x, residual, _finite(ceiling))


def _ceiling(relu: torch.nn.Module | float) -> float | None:
    """Return the ceiling of a ReLU, infinity without one; None of a module that is none."""
    return ceiling_of(relu) if isinstance(relu, torch.nn.Module) else relu


def _finite(ceiling: float) -> float | None:
    return None if ceiling == math.inf else ceiling


def _can_be_one(passed: Layers, relu: torch.nn.Module | float) -> bool:
    norm, *nothing = passed
    return (
        type(norm) in NORMS
        and not is_observed(norm)
        and _ceiling(relu) is not None
        and not (isinstance(relu, torch.nn.Module) and is_observed(relu))
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
