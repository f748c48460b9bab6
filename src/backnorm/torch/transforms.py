"""Normalisation that can be differentiated in every mode: under torch.func and in forward mode."""

from __future__ import annotations

import torch
from torch import Tensor

from backnorm.errors import BacknormError
from backnorm.torch import operations
from backnorm.torch.memory import check_before_pytorch

__all__ = ["UnsupportedTransformError", "allow_in_graph", "forward", "inference"]


class UnsupportedTransformError(BacknormError, NotImplementedError):
    """A combination of transforms was asked for that would give wrong derivatives."""


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and biased variance of the batch, which are constants."""
    _refuse_forward_mode_twice()
    y, mean, variance, _ = operations.forward(x, None, weight, bias, eps, False)
    return y, mean, variance


def inference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return y, normalised with given statistics, which are constants."""
    _refuse_forward_mode_twice()
    check_before_pytorch(running_mean=mean, running_var=variance)
    # A later batch in training moves the running statistics without telling autograd.
    mean, variance = mean.detach().clone(), variance.detach().clone()
    y: Tensor = operations.inference(x, None, weight, bias, mean, variance, eps, False)
    return y


def _refuse_forward_mode_twice() -> None:
    """Raise under two forward modes: PyTorch (2.13) then loses the second derivative of functions.

    (The tangent of the tangent that an autograd.Function returns is 0, whatever it computes.)
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    if sum(level.key() == torch._C._functorch.TransformType.Jvp for level in stack) > 1:
        raise UnsupportedTransformError(
            "PyTorch cannot differentiate forward mode by forward mode where functions bring their "
            "own derivative, as batch normalisation by backnorm does; take reverse mode for one of "
            "the two (torch.func.jacrev, grad or vjp; torch.func.hessian does)"
        )


def allow_in_graph() -> bool:
    """Have a compiler put `forward` and `inference` into its graph as they are.

    It would look into them and lose what they say of derivatives. The registration wants
    Dynamo imported, which takes longer than importing us: so it is Dynamo that calls this, when it
    comes across a call of it (and takes the result as a constant).
    """
    torch.compiler.allow_in_graph([forward, inference])
    return True


allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]
