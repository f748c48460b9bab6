"""Masks: the elements of a batch that count in statistics, and how often (`backnorm.weighted`)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from backnorm.errors import ArgumentValueError
from backnorm.torch.checks import TensorTypeError, TensorValueError, check_device, not_a_tensor
from backnorm.torch.dispatch import needs_dispatcher
from backnorm.torch.memory import statistics_type

_INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64


def mask_of(
    input: Tensor, mask: Tensor | None, lengths: Tensor | None, reproducible: bool
) -> Tensor | None:
    """Return the mask of an input in the shape (N, 1, ...), or None if every element counts once.

    Raises
    ------
    TensorTypeError, TensorValueError
        If the mask or the lengths are not accepted for this input, which has been checked.
    """
    if lengths is not None:
        if mask is not None:
            raise TensorValueError("lengths", "is another form of the mask: pass one of the two")
        mask = _of_lengths(input, lengths)
    if mask is None:
        return None
    if not isinstance(mask, Tensor):
        raise not_a_tensor("mask", mask)
    if not (mask.dtype is torch.bool or (mask.is_floating_point() and not reproducible)):
        raise TensorTypeError(
            "mask", "unsupported element type", came=mask.dtype, hint="call mask.bool()",
            accepted="torch.bool, or without reproducible=True weights of a floating-point type",
        )  # fmt: skip
    if mask.requires_grad:
        raise TensorValueError(
            "mask",
            "must not require a gradient, because it is treated as a constant",
            hint="pass mask.detach()",
        )
    check_device("mask", mask, "input", input)
    shape = (input.shape[0], 1, *input.shape[2:])
    column = mask.unsqueeze(1) if mask.dim() == input.dim() - 1 else mask
    if column.dim() != len(shape) or any(
        own not in (1, size) for own, size in zip(column.shape, shape, strict=True)
    ):
        raise TensorValueError(
            "mask",
            "must have the shape of input without its channels",
            came=f"shape {tuple(mask.shape)}",
            accepted=f"shape {shape} or {(shape[0], *shape[2:])}, or 1 in place of a number",
        )
    return column.expand(shape)


def _of_lengths(input: Tensor, lengths: Tensor) -> Tensor:
    """Return the mask of the first elements of each sequence."""
    size, of_sequences = input.shape[-1], input.dim() == 3 and isinstance(lengths, Tensor)
    fits = of_sequences and lengths.shape == input.shape[:1] and lengths.dtype in _INTEGERS
    # Operators that are only recorded have no values to look at.
    if fits and not needs_dispatcher(lengths):
        # T may be too large for the type of the lengths.
        fits = bool(((lengths >= 0) & (lengths.long() <= size)).all())
    if not fits:
        raise TensorValueError(
            "lengths",
            "must be the lengths of the sequences of an input (N, C, T)",
            came=f"{lengths!r} for an input of shape {tuple(input.shape)}",
            accepted="integers from 0 to T, in a tensor of shape (N,)",
        )
    check_device("lengths", lengths, "input", input)
    return torch.arange(size, device=input.device) < lengths[:, None]


def over_padding(
    function: Callable[[Tensor], Tensor], input: Tensor, mask: Tensor | None
) -> Tensor:
    """Return function(input), a tensor of input's shape.

    An uncounted element that is NaN or infinite becomes NaN in the result, and `function` gets 0
    instead: in the sums of a gradient, its product with a dy of 0 would be NaN.
    """
    # The sum of finite elements is finite, so usually one pass over the input is enough. (If
    # nothing but finite elements overflows the sum, the result is the same.) PyTorch takes ten
    # times as long to sum float32 in float64.
    wide = statistics_type(input.dtype)
    if mask is None or (
        not needs_dispatcher(input, mask) and math.isfinite(input.detach().sum(dtype=wide))
    ):
        return function(input)
    valid = (mask != 0) | input.isfinite()
    return torch.where(valid, function(torch.where(valid, input, 0.0)), math.nan)


def check_count(count: Tensor) -> None:
    """Raise unless the number of counted elements of a channel is more than 1."""
    if count <= 1:
        raise ArgumentValueError(
            "mask",
            "Expected more than 1 value per channel when training",
            came=f"{float(count):g} counted elements",
            hint="in a model, call eval() to use the running statistics",
        )
