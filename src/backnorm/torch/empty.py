"""An empty input, as PyTorch has it: it looks at hardly anything else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backnorm.torch.rectifiers import rectified

__all__ = ["result"]


def result(arguments: tuple[Any, ...], relu: bool, ceiling: float | None = None) -> Tensor | None:
    """Return y of an empty input, or None if the input is another, or PyTorch would raise.

    PyTorch multiplies with the first weight and adds the first bias, whatever the types, lengths
    and places of parameters and running statistics.

    Parameters
    ----------
    arguments
        As in `checks.check`.
    relu : bool
        Whether there is a ReLU behind.
    ceiling : float, optional
        Of the ReLU.
    """
    input, running_mean, running_var, weight, bias, _, residual = arguments
    given = input, running_mean, running_var, weight, bias, residual
    if not all(each is None or isinstance(each, Tensor) for each in given):
        return None
    try:
        if input.numel() or input.is_nested or input.layout is not torch.strided:
            return None
        if residual is not None and _kind(residual) != _kind(input):
            return None
        y: Tensor = input.clone()
        if weight is not None:
            y = y * weight[0]
        if bias is not None:
            y = y + bias[0]
        if residual is not None:
            y = y + residual
        return rectified(y, ceiling) if relu else y
    except (RuntimeError, IndexError, TypeError, AttributeError):
        return None


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
