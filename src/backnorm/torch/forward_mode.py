"""What rules of forward mode share, so that forward mode can differentiate them again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from backnorm.torch.checks import TensorValueError

__all__ = ["check_constants", "differentiable", "primals"]


def differentiable(jvp: Callable[..., Any]) -> Callable[..., Any]:
    """Return a rule of forward mode that forward mode can differentiate again.

    PyTorch calls it with forward mode off, for all levels at once: of a rule that brings its own
    derivative the tangent of the tangent would be 0. The level at hand is left out by `primals`.
    """

    @functools.wraps(jvp)
    def call(*arguments: Any) -> Any:
        with forward_ad._set_fwd_grad_enabled(True):
            return jvp(*arguments)

    return call


def check_constants(tmean: Tensor | None, tvariance: Tensor | None) -> None:
    """Raise for tangents of given statistics, beside those of other inputs: as PyTorch does."""
    for name, tangent in (("running_mean", tmean), ("running_var", tvariance)):
        if tangent is not None:
            raise TensorValueError(
                name,
                "is a constant to derivatives, and must have no tangent",
                hint=f"pass torch.autograd.forward_ad.unpack_dual({name}).primal",
            )


def primals(ctx: Any) -> list[Tensor | None]:
    """Return the saved tensors without their tangents, at the level at hand."""
    # Not `forward_ad.unpack_dual`, which knows no level of forward mode while a compiler traces.
    return [
        None if each is None else torch._VF._unpack_dual(each, level=0).primal
        for each in ctx.saved_tensors
    ]
