"""Kinds of layers that libraries have beside PyTorch's: frozen ones, ones with an activation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Proxy

from backnorm.arithmetics import Arithmetic
from backnorm.torch import functional, tools
from backnorm.torch.activations import activation_of
from backnorm.torch.arithmetics import named
from backnorm.torch.separable import is_observed

__all__ = ["Activated", "Frozen"]


class Activated:
    """Put before a class of layers with an activation `act`, and with `drop` before that."""

    drop: torch.nn.Module
    act: torch.nn.Module

    #: Whether normalisation and activation are computed in one pass, where that is possible.
    at_once: bool = False

    def why_not_fused(self) -> str | None:
        """Return why the activation has to be computed by `act`, or None."""
        drop, act = self.drop, self.act
        if activation_of(act) is None:
            return f"its activation is {type(act).__name__}"
        if type(drop) is not torch.nn.Identity:
            return f"{type(drop).__name__} comes before its activation"
        if is_observed(act) or is_observed(drop):
            return "its activation has hooks"
        if "forward" in act.__dict__ or "forward" in drop.__dict__:
            return "its activation has a forward of its own"
        return None


@tools.unscriptable
class Frozen:
    """Put before a class of layers whose statistics and parameters are all constants."""

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor
    eps: float
    arithmetic: Arithmetic | None = None

    def __repr__(self) -> str:
        """Return the library's, and what elements are computed in where the layer says it."""
        return named(super().__repr__().removesuffix(")"), self.arithmetic) + ")"

    def _is_ordinary(self, x: Tensor) -> bool:
        """Whether a batch needs none of the broadcasting and promotion of the layer's formula.

        Beside float32 constants 16-bit values become float32 there.
        """
        mean, variance = self.running_mean, self.running_var
        return (
            not isinstance(x, Proxy)
            and x.dim() == 4
            and x.dtype.is_floating_point
            and x.dtype == mean.dtype == variance.dtype == self.weight.dtype == self.bias.dtype
            and x.shape[1] == mean.shape[0]
            and not (mean.requires_grad or variance.requires_grad)
        )

    def _normalised(self, x: Tensor) -> Tensor:
        return functional.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps,
            arithmetic=self.arithmetic,
        )  # fmt: skip
