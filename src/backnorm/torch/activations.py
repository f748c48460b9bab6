"""Activations behind a normalisation: which modules are one, and what they compute.

A ReLU is computed from the mask of its result. The derivative of the others needs the activation's
input, which the backward pass computes again from x. So that input is not kept, and the activation
overwrites it. Elements and derivatives are those of PyTorch's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from backnorm.torch.rectifiers import is_exact

__all__ = ["RELU", "Activation", "activated", "activation_of", "derivative"]


class Activation(NamedTuple):
    """An activation: its name, and the upper bound of a ReLU that has one."""

    name: str
    ceiling: float | None = None

    def __str__(self) -> str:
        if self.name != "relu":
            return f"a {_KINDS[self.name].module.__name__}"
        return "a ReLU" if self.ceiling is None else f"a ReLU with the ceiling {self.ceiling}"


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

RELU = Activation("relu")

_ACTIVATIONS: dict[type[torch.nn.Module], Activation] = {
    torch.nn.ReLU: RELU,
    **{kind.module: Activation(name) for name, kind in _KINDS.items()},
}


def activation_of(
    module: torch.nn.Module, cls: type[torch.nn.Module] | None = None
) -> Activation | None:
    """Return the activation that a module computes; None for a module that is not a known one.

    `cls` is the class to go by, the module's own without it.
    """
    cls = cls or type(module)
    if cls in (torch.nn.ReLU6, torch.nn.Hardtanh):
        if is_exact(module.min_val, module.max_val):
            return Activation("relu", float(module.max_val))
        return None
    return _ACTIVATIONS.get(cls)


def activated(z: Tensor, name: str, *, in_place: bool = False) -> Tensor:
    """Return z with an activation other than a ReLU applied."""
    return _KINDS[name].function(z, inplace=in_place)


def derivative(dy: Tensor, z: Tensor, activation: str, *, overwrite: bool = False) -> Tensor:
    """Return the gradient of z, given that of the activation's result; it may be written to z."""
    kind = _KINDS[activation]
    return (kind.overwriting if overwrite else kind.derivative)(dy, z)
