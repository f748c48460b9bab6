"""The operators on the memory of tensors, wherever it is.

Nothing here knows autograd. Every function takes tensors of strided layout on one device, reads
their memory where it is, and returns new tensors that lie in memory as `x` does
(`torch.empty_like(x)`: the same strides, if `x` is dense in some order of its axes).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import Tensor

from backnorm.layout import mask_size
from backnorm.torch import cpu
from backnorm.torch.checks import TensorValueError
from backnorm.torch.statistics import Running, statistics_type, update_running

__all__ = [
    "Running",
    "backward",
    "double_backward",
    "forward",
    "inference",
    "mask_size",
    "relu_backward",
    "relu_forward",
    "relu_inference",
    "statistics_type",
    "trained",
    "unpack_mask",
    "update_running",
]


def engine_of(x: Tensor) -> ModuleType:
    """Return the module that computes where x is."""
    if x.is_cpu:
        return cpu
    try:
        # Triton is needed there alone.
        from backnorm.torch import gpu
    except ModuleNotFoundError as error:
        raise TensorValueError(
            "input",
            f"is on a device whose kernels need a package that is not installed ({error})",
            came=f"device {x.device}",
            hint="pip install 'backnorm[cuda]'",
        ) from error
    return gpu


def trained(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None,
    *,
    relu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Any]:
    """Return what `forward` or `relu_forward` returns, and a step for the backward pass."""
    engine = engine_of(x)
    result: tuple[Tensor, Tensor, Tensor, Tensor | None, Any] = engine.trained(
        x, residual, weight, bias, eps, running, relu=relu
    )
    return result


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, and mean and biased variance of the batch, of `statistics_type(x.dtype)`.

    Running statistics move towards those of the batch, unless it is empty; the variance goes in
    unbiased. Autograd is not told, as in PyTorch: a graph that needs the values of before has kept
    them.
    """
    return trained(x, None, weight, bias, eps, running, relu=False)[:3]


def relu_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return relu(normalised x + residual), mean and variance, and a mask of its positive elements.

    The mask has a bit an element in x's order in memory, and `mask_size(x.numel())` bytes.
    """
    y, mean, variance, mask, _ = trained(x, residual, weight, bias, eps, running, relu=True)
    assert mask is not None
    return y, mean, variance, mask


def inference(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return y, normalised with given statistics."""
    arguments = x, None, mean, variance, weight, bias, eps
    y: Tensor = engine_of(x).inference(*arguments, relu=False)
    return y


def relu_inference(
    x: Tensor,
    residual: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return relu(normalised x + residual), with given statistics."""
    arguments = x, residual, mean, variance, weight, bias, eps
    y: Tensor = engine_of(x).inference(*arguments, relu=True)
    return y


def backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    step: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, and of weight and bias, the last two of weight's type.

    `step` is what `trained` returned, if that was the forward pass.
    """
    arguments = x, dy, None, mean, variance, weight, eps, training
    dx, dweight, dbias, _ = engine_of(x).backward(*arguments, has_residual=False, step=step)
    return dx, dweight, dbias


def relu_backward(
    x: Tensor,
    dy: Tensor,
    mask: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    has_residual: bool,
    step: Any = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and residual, in training: see `backward`."""
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None] = engine_of(x).backward(
        x, dy, mask, mean, variance, weight, eps, True, has_residual=has_residual, step=step
    )
    return gradients


def double_backward(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    ddx: Tensor | None,
    ddweight: Tensor | None,
    ddbias: Tensor | None,
    eps: float,
    training: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given those of what `backward` returns."""
    gradients: tuple[Tensor, Tensor, Tensor] = engine_of(x).double_backward(
        x, dy, mean, variance, weight, ddx, ddweight, ddbias, eps, training
    )
    return gradients


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of `relu_forward` as booleans that lie as x does."""
    positive: Tensor = engine_of(x).unpack_mask(mask, x)
    return positive
