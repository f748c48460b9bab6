"""Compute activations by PyTorch's operators; say which activation a PyTorch module computes.

PyTorch's ReLU6 is ``hardtanh(y, 0, 6)``. The derivative of hardtanh is 0 where y equals a bound, as
in the kernels; the derivative of ``clamp`` would be 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from backnorm.activations import RELU, Activation

_aten = torch.ops.aten


def _silu_in_place(dy: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.silu_backward.grad_input(dy, z, grad_input=z)
    return dz


class _Smooth(NamedTuple):
    """PyTorch's functions for an activation whose derivative is computed from the input z.

    `overwriting` computes the same as `derivative`, but may write its result to the memory of z.
    """

    function: Callable[..., Tensor]
    derivative: Callable[[Tensor, Tensor], Tensor]
    overwriting: Callable[[Tensor, Tensor], Tensor]


_hardswish = _aten.hardswish_backward.default
_SMOOTH = {
    "silu": _Smooth(functional.silu, _aten.silu_backward.default, _silu_in_place),
    # PyTorch has no in-place form of Hardswish's derivative.
    "hardswish": _Smooth(functional.hardswish, _hardswish, _hardswish),
}

_MODULES: dict[type[torch.nn.Module], Activation] = {
    torch.nn.ReLU: RELU,
    torch.nn.SiLU: Activation("silu"),
    torch.nn.Hardswish: Activation("hardswish"),
}


def activation_of(module: torch.nn.Module) -> Activation | None:
    """Return the activation that a module computes, or None."""
    cls = type(module)
    if cls in (torch.nn.ReLU6, torch.nn.Hardtanh):
        if _is_exact_ceiling(module.min_val, module.max_val):
            return Activation("relu", float(module.max_val))
        return None
    return _MODULES.get(cls)


def _is_exact_ceiling(lower: object, upper: object) -> bool:
    """Whether a Hardtanh with these bounds is a ReLU with a ceiling. The ceiling must be a number
    that every element type represents exactly.

    If an element type cannot represent the ceiling, PyTorch rounds the ceiling, and the gradient
    then depends on the direction of this rounding.
    """
    if not all(type(bound) in (int, float) for bound in (lower, upper)) or lower != 0:
        return False
    assert isinstance(upper, int | float)
    # The ceiling must have at most eight significant bits, as bfloat16 has, and be in the range of
    # float16's normal numbers.
    return 2.0**-14 <= upper <= 2.0**15 and math.ldexp(math.frexp(upper)[0], 8).is_integer()


def split(activation: Activation | None) -> tuple[Activation | None, Activation | None]:
    """Return two activations: the one that kernels compute, and the one that PyTorch's operators
    compute after the kernel.

    At most one of the two is not None: kernels compute a ReLU, PyTorch any other activation.
    """
    if activation is None or activation.name == "relu":
        return activation, None
    return None, activation


def add_and_activate(y: Tensor, residual: Tensor | None, activation: Activation | None) -> Tensor:
    """Return activation(y + residual), computed by operators that PyTorch differentiates."""
    if residual is not None:
        y = y + residual
    return y if activation is None else activate(y, activation)


def activate(y: Tensor, activation: Activation, *, in_place: bool = False) -> Tensor:
    """Return y with an activation applied."""
    # The fields are read by their names, because PyTorch 2.11's compiler cannot unpack a named
    # tuple that is an input of the graph.
    name, ceiling = activation.name, activation.ceiling
    if name != "relu":
        return _SMOOTH[name].function(y, inplace=in_place)
    if ceiling is not None:
        return functional.hardtanh(y, 0.0, ceiling, inplace=in_place)
    return torch.relu_(y) if in_place else torch.relu(y)


def derivative(dy: Tensor, z: Tensor, activation: Activation, *, overwrite: bool = False) -> Tensor:
    """Return the gradient with respect to z, the input of a smooth activation.

    If `overwrite` is true, the result may be written to the memory of z.
    """
    smooth = _SMOOTH[activation.name]
    return (smooth.overwriting if overwrite else smooth.derivative)(dy, z)
