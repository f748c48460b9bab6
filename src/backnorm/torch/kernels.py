"""The operations on the memory of tensors, wherever it is.

Nothing here knows autograd. Every function takes tensors of strided layout on one device, reads
their memory where it is, and returns new tensors that lie in memory as `x` does
(`torch.empty_like(x)`: the same strides, if `x` is dense in some order of its axes).

A residual and a ceiling come only with `relu`: the one is added before the ReLU, the other is the
most that it returns, None without one. With another activation, "silu" or "hardswish", there is
neither. What elements are computed in, `arithmetic`, is decided by the caller (`arithmetics`).
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from backnorm.activations import Activation
from backnorm.layout import mask_size
from backnorm.problem import check_mask
from backnorm.torch import cpu
from backnorm.torch.checks import TensorValueError
from backnorm.torch.metadata import metadata
from backnorm.torch.statistics import Running

__all__ = [
    "backward",
    "backward_activated",
    "double_backward",
    "engine_of",
    "forward",
    "forward_activated",
    "inference",
    "inference_activated",
    "unpack_mask",
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


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None,
    relu: bool,
    ceiling: float | None,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return y, mean and biased variance of the batch, and the mask.

    Mean and variance are of `statistics_type(x.dtype)`. With `relu`, the mask says which elements
    of y are positive, and below the ceiling: a bit an element in x's order in memory,
    `mask_size(x.numel())` bytes.

    Running statistics are updated in place, with the unbiased variance, unless the batch is empty.
    Autograd is not told, as in PyTorch: a graph that needs the old values has a copy.
    """
    follows = Activation("relu", ceiling) if relu else None
    run, how = engine_of(x).forward, (eps, "NCX", follows, arithmetic, False)
    result: tuple[Tensor, Tensor, Tensor, Tensor | None]
    if running is None:
        result = run(x, residual, weight, bias, None, None, *how)
    else:
        mean, variance, momentum = running
        result = run(x, residual, weight, bias, mean, variance, *how, momentum=momentum)
    return result


def forward_activated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    running: Running | None,
    activation: str,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y with another activation than a ReLU applied, and the rest as `forward` does."""
    run, how = engine_of(x).forward_activated, (eps, "NCX", activation, arithmetic)
    result: tuple[Tensor, Tensor, Tensor]
    if running is None:
        result = run(x, weight, bias, None, None, *how)
    else:
        mean, variance, momentum = running
        result = run(x, weight, bias, mean, variance, *how, momentum=momentum)
    return result


def inference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    relu: bool,
    ceiling: float | None,
    arithmetic: str,
) -> Tensor:
    """Return y, normalised with given statistics."""
    follows = Activation("relu", ceiling) if relu else None
    run, how = engine_of(x).inference, (eps, "NCX", follows, arithmetic)
    y: Tensor
    (y,) = run(x, residual, mean, variance, weight, bias, *how)
    return y


def inference_activated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    eps: float,
    activation: str,
    arithmetic: str,
) -> Tensor:
    """Return y, normalised with given statistics, with another activation than a ReLU applied."""
    run, how = engine_of(x).inference_activated, (eps, "NCX", activation, arithmetic)
    y: Tensor
    (y,) = run(x, mean, variance, weight, bias, *how)
    return y


def backward_activated(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and bias through an activation other than a ReLU.

    The activation's input is recomputed from x and the batch's statistics.
    """
    engine, statistics = engine_of(x), (mean, variance, weight)
    (dz,) = engine.activation_backward(
        x, dy, *statistics, bias, eps, "NCX", activation, arithmetic, None
    )
    # dz is new, so dx is written over it.
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None] = engine.backward(
        x, dz, None, *statistics, eps, "NCX", True, False, arithmetic, False, dz
    )
    return gradients


def backward(
    x: Tensor,
    dy: Tensor,
    mask: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    has_residual: bool,
    arithmetic: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight, bias and residual, those of channels of weight's type.

    `mask` is that of the forward pass, None if it had no ReLU.
    """
    gradients: tuple[Tensor, Tensor, Tensor, Tensor | None] = engine_of(x).backward(
        x, dy, mask, mean, variance, weight, eps, "NCX", training, has_residual, arithmetic, False,
        None,
    )  # fmt: skip
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
    operands = x, dy, ddx, mean, variance, weight, ddweight, ddbias
    tensors = engine_of(x).TENSORS
    _, read = tensors.checked("double_backward", operands, epsilon=eps, training=training)
    gradients: tuple[Tensor, Tensor, Tensor] = engine_of(x).double_backward(
        read[:3], read[3:], eps, training
    )
    return gradients


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return a mask as booleans with the shape and strides of x, whose elements are not read."""
    check_mask(metadata(mask), mask_size(x.numel()))
    like = torch.empty_strided(x.shape, x.stride(), device="meta")
    positive: Tensor = engine_of(mask).unpack_mask(mask, like)
    return positive
