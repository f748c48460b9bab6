"""Activations behind a normalisation: which modules and functions are one, and what they do.

One is either the ceiling of a ReLU, infinity where it has none (`rectifiers`), or the name of
another, whose derivative wants what it was applied to. That is computed again from x in the
backward pass, so it is not kept, and is overwritten by the activation. Elements and derivatives are
those of PyTorch's operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from backnorm.torch.rectifiers import ceiling_of, rectified

__all__ = [
    "FUNCTIONS",
    "Activation",
    "activated",
    "activation_of",
    "derivative",
    "in_words",
]

Activation: TypeAlias = float | str


class _Kind(NamedTuple):
    """PyTorch's module, function, and derivative of (dy, what the function was applied to).

    `overwriting` is the derivative, which may write to the second tensor.
    """

    module: type[torch.nn.Module]
    function: Callable[..., Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    overwriting: Callable[[Tensor, Tensor], Tensor]


_aten = torch.ops.aten


def _silu_in_place(dy: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.silu_backward.grad_input(dy, z, grad_input=z)
    return dz


_hardswish = _aten.hardswish_backward.default
_KINDS = {
    "silu": _Kind(torch.nn.SiLU, functional.silu, _aten.silu_backward.default, _silu_in_place),
    # PyTorch's derivative has no form that writes to what it is given.
    "hardswish": _Kind(torch.nn.Hardswish, functional.hardswish, _hardswish, _hardswish),
}

_NAMES = {kind.module: name for name, kind in _KINDS.items()}

#: Names by functions.
FUNCTIONS: dict[Any, str] = {kind.function: name for name, kind in _KINDS.items()}


def activation_of(module: torch.nn.Module) -> Activation | None:
    """Return what a module is as an activation, None if it is none that is known here."""
    ceiling = ceiling_of(module)
    return _NAMES.get(type(module)) if ceiling is None else ceiling


def in_words(activation: Activation) -> str:
    """Return what an activation is called."""
    if isinstance(activation, str):
        return f"a {_KINDS[activation].module.__name__}"
    return "a ReLU" if activation == math.inf else f"a ReLU with the ceiling {activation}"


def activated(z: Tensor, activation: Activation, *, in_place: bool = False) -> Tensor:
    """Return z with an activation applied."""
    if isinstance(activation, str):
        return _KINDS[activation].function(z, inplace=in_place)
    return rectified(z, None if activation == math.inf else activation, in_place=in_place)


def derivative(dy: Tensor, z: Tensor, activation: str, *, overwrite: bool = False) -> Tensor:
    """Return the gradient of z, given that of the activation's result; it may be written to z."""
    kind = _KINDS[activation]
    return (kind.overwriting if overwrite else kind.derivative)(dy, z)
