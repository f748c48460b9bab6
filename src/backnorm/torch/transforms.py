"""Normalisation that can be differentiated in every mode: under torch.func and in forward mode."""

from __future__ import annotations

import torch
from torch import Tensor

from backnorm.arithmetics import Arithmetic
from backnorm.torch import moving, operations
from backnorm.torch.memory import check_before_pytorch

__all__ = ["allow_in_graph", "forward", "inference"]


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, arithmetic: Arithmetic | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and biased variance of the batch, which are constants."""
    found: tuple[Tensor, Tensor, Tensor] = operations.forward(
        x, None, weight, bias, eps, False, arithmetic, None
    )
    return found


def inference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: Arithmetic | None,
) -> Tensor:
    """Return y, normalised with given statistics, which are constants."""
    check_before_pytorch(running_mean=mean, running_var=variance)
    # A later batch in training moves the running statistics without telling autograd. They keep
    # their tangents, which the operation refuses.
    with torch.no_grad():
        mean, variance = mean.clone(), variance.clone()
    given = x, None, weight, bias, mean, variance, eps, False, arithmetic, None
    y: Tensor = operations.inference(*given)
    return y


def allow_in_graph() -> bool:
    """Have a compiler put the functions of transforms into its graph as they are.

    It would look into them and lose what they say of derivatives. The registration wants
    Dynamo imported, which takes longer than importing us: so it is Dynamo that calls this, when it
    comes across a call of it (and takes the result as a constant).
    """
    torch.compiler.allow_in_graph([forward, inference, moving.transformed])
    return True


allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
