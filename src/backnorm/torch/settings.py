"""The arguments of a call that are no tensors: training, momentum and eps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backnorm.errors import ArgumentValueError
from backnorm.scalars import check_flag, check_number
from backnorm.torch.checks import check_tensor

__all__ = ["check_eps", "check_settings", "read"]


def read(training: Any, momentum: Any, eps: Any) -> tuple[bool, float, float]:
    """Return the settings as Python's own, or raise.

    Numbers may be what PyTorch takes for one: also a boolean, or a tensor without axes.
    """
    return check_flag("training", training), _number("momentum", momentum), _number("eps", eps)


def _number(name: str, value: Any) -> Any:
    if isinstance(value, torch.SymFloat | torch.SymInt):
        return value
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        value = value.item()
    if isinstance(value, bool | np.bool_):
        value = float(value)
    return check_number(name, value, accepted="float")


def check_eps(training: bool, eps: float) -> None:
    """Raise for an eps that PyTorch refuses."""
    if not eps > 0.0:
        if training:
            raise ArgumentValueError(
                "eps", f"batch_norm eps must be positive during training, but got {eps}"
            )
        if not eps >= 0.0:
            raise ArgumentValueError("eps", f"batch_norm eps must be non-negative, but got {eps}")


def check_settings(input: Tensor, training: bool, eps: float) -> None:
    """Raise for an eps that PyTorch refuses, and for a batch whose variance would be 0."""
    check_eps(training, eps)
    if not training:
        return
    try:
        shape = input.shape
    except RuntimeError:
        # That of a nested tensor.
        check_tensor("input", input)
        raise
    # The product would be looked at more slowly.
    if len(shape) > 1 and input.numel() == shape[1] and math.prod(shape[2:], start=shape[0]) == 1:
        raise ArgumentValueError(
            "input",
            "Expected more than 1 value per channel when training",
            came=f"input size {tuple(shape)}",
            hint="in a model, call eval() to use the running statistics",
        )
