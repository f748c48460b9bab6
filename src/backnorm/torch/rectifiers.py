"""ReLUs by PyTorch's own operators, with a ceiling or without.

A ceiling is None where there is none. ``hardtanh(y, 0, ceiling)`` is what PyTorch's ReLU6 is; its
derivative is 0 where y has reached a bound, as ours. (That of ``clamp`` is 1 there: it is no ReLU.)
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import hardtanh

from backnorm.activations import check_ceiling
from backnorm.torch.metadata import element_type

__all__ = ["derivative", "is_exact", "passing", "rectified", "settled"]


def settled(ceiling: object, dtype: torch.dtype) -> float | None:
    """Return a ceiling as elements of a type have it, None for one that bounds nothing; or raise.

    So that it is the same for our kernels and for PyTorch's operators: those would round y to the
    type, and compare it with a ceiling that was not rounded.
    """
    if ceiling is None:
        return None
    if is_compiling() and isinstance(ceiling, float):
        # A compiler makes variables of numbers that differ between calls or layers.
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        ceiling = guard_scalar(ceiling)
    return _as_constant(ceiling, dtype)


def _as_constant(ceiling: object, dtype: torch.dtype) -> float | None:
    return _rounded(ceiling, dtype) if type(ceiling) is float else _checked(ceiling, dtype)


# Dynamo calls it when it comes across it.
_as_constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _checked(ceiling: object, dtype: torch.dtype) -> float | None:
    rounded = check_ceiling(ceiling, element_type(dtype))
    return None if math.isinf(rounded) else rounded


_rounded = functools.lru_cache(maxsize=64)(_checked)


def rectified(y: Tensor, ceiling: float | None, *, in_place: bool = False) -> Tensor:
    """Return y with a ReLU applied."""
    if ceiling is not None:
        return hardtanh(y, 0.0, ceiling, inplace=in_place)
    return torch.relu_(y) if in_place else torch.relu(y)


def passing(y: Tensor, ceiling: float | None) -> Tensor:
    """Return which elements of a ReLU's result y pass a gradient on: those between its bounds."""
    return y > 0 if ceiling is None else (y > 0) & (y < ceiling)


def derivative(dy: Tensor, y: Tensor, ceiling: float | None) -> Tensor:
    """Return the gradient of a ReLU's input, given its input or its result y."""
    dx: Tensor
    if ceiling is None:
        dx = torch.ops.aten.threshold_backward(dy, y, 0)
    else:
        dx = torch.ops.aten.hardtanh_backward(dy, y, 0.0, ceiling)
    return dx


def is_exact(lower: object, upper: object) -> bool:
    """Whether `hardtanh` with these bounds is a ReLU with a ceiling that every type has exactly.

    Where a type rounds it, PyTorch's gradient depends on which way.
    """
    if not all(type(bound) in (int, float) for bound in (lower, upper)) or lower != 0:
        return False
    assert isinstance(upper, int | float)
    # The eight bits of bfloat16, within the normal numbers of float16.
    return 2.0**-14 <= upper <= 2.0**15 and math.ldexp(math.frexp(upper)[0], 8).is_integer()
