"""The operations on the memory of CPU tensors. Nothing here knows autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backnorm.errors import ArgumentValueError
from backnorm.executable import operation
from backnorm.second_order import arrays
from backnorm.torch.arithmetics import own
from backnorm.torch.memory import array_of, as_type, dense, empty_like, tensor_of, wide
from backnorm.torch.tensors import CPU as TENSORS

__all__ = [
    "TENSORS",
    "activation_backward",
    "apply",
    "apply_forward",
    "backward",
    "double_backward",
    "forward",
    "forward_activated",
    "inference",
    "inference_activated",
    "message",
    "parts",
    "reduce",
    "reduce_bins",
    "reduce_forward",
    "reduce_forward_bins",
    "unpack_mask",
]

#: See `kernels`.
forward, inference = operation("forward", TENSORS), operation("inference", TENSORS)
backward = operation("backward", TENSORS)
activation_backward = operation("activation_backward", TENSORS)

#: See `phases`.
reduce_forward = operation("reduce_forward", TENSORS, exchanged=True)
apply_forward = operation("apply_forward", TENSORS, exchanged=True)
reduce = operation("reduce", TENSORS, exchanged=True)
apply = operation("apply", TENSORS, exchanged=True)

_of_forward = operation("forward_coefficients", TENSORS, exchanged=True)
_of_backward = operation("backward_coefficients", TENSORS, exchanged=True)


def forward_activated(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    *options: Any,
    momentum: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels`."""
    operands = x, None, weight, bias, mean, variance
    found: tuple[Tensor, Tensor, Tensor]
    found = forward(*operands, *options, False, momentum=momentum)[:3]
    return found


def inference_activated(x: Tensor, *options: Any) -> tuple[Tensor]:
    """See `kernels`."""
    found: tuple[Tensor] = inference(x, None, *options)
    return found


def message(sums: Tensor, count: int) -> Tensor:
    """Return what a phase tells the next as one tensor."""
    return torch.cat((sums.flatten(), sums.new_full((1,), count)))


def parts(message: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    """Return what `message` was made of."""
    one, other, count = np.split(array_of(message), (message.numel() // 2, -1))
    if not 0.0 <= count[0] < 2.0**63:
        raise ArgumentValueError(
            "sums",
            "its last number must be that of the elements of a channel",
            came=count[0],
            accepted="a number, not negative",
        )
    return one, other, int(count[0])


def reduce_forward_bins(x: Tensor, arithmetic: str) -> tuple[Tensor, int]:
    """Return the sums of x and of x^2 as integers, and the elements of a channel: see `binned`."""
    found: tuple[Tensor, int] = reduce_forward(x, "NCX", arithmetic, True)
    return found


def reduce_bins(
    x: Tensor, dy: Tensor, mask: Tensor | None, mean: Tensor, arithmetic: str
) -> tuple[Tensor, int]:
    """Return what `reduce` sums as integers, and the elements of a channel: see `binned`."""
    found: tuple[Tensor, int] = reduce(x, dy, mask, mean, "NCX", arithmetic, True)
    return found


def forward_coefficients(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and biased variance of x, and the coefficients of y in `arithmetic`."""
    return _of_forward(x, weight, bias, eps, "NCX", own(x.dtype, arithmetic))


def backward_coefficients(
    x: Tensor,
    dy: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    eps: float,
    training: bool,
    arithmetic: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of weight and bias, and the coefficients of dx in `arithmetic`."""
    how = eps, "NCX", training, own(x.dtype, arithmetic)
    return _of_backward(x, dy, mean, variance, weight, *how)


def inference_coefficients(
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    arithmetic: str,
) -> Tensor:
    """Return the coefficients of y of given statistics in `arithmetic`."""
    gain = 1.0 / torch.sqrt(variance.double() + eps)
    gain = gain if weight is None else weight.double() * gain
    slope = torch.zeros_like(gain) if bias is None else bias.double()
    dtype = getattr(torch, arithmetic)
    # What is left of the mean is part of a constant: see `cpu.kernels.singles`.
    slope = slope + gain * (mean.to(dtype).double() - mean)
    return torch.stack((mean.double(), torch.zeros_like(gain), slope, gain)).to(dtype)


def double_backward(
    elements: Sequence[Any], channels: Sequence[Any], eps: float, training: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, dy and weight, given those of what `backward` returns.

    `elements` are x, dy and ddx, `channels` mean, variance, weight, ddweight and ddbias.
    """
    x, dy, ddx = elements
    x = dense(x)
    gx, gdy = empty_like(x), empty_like(x)
    result = arrays.double_backward(
        [array_of(x), array_of(dy), None if ddx is None else array_of(ddx)],
        [_channels(each, x) for each in channels],
        epsilon=eps,
        data_format="NCX",
        training=training,
        out=(array_of(gx), array_of(gdy)),
    )
    return gx, gdy, as_type(channels[2], tensor_of(result.gamma))


def unpack_mask(mask: Tensor, x: Tensor) -> Tensor:
    """Return the mask of a forward pass as booleans that lie as x does."""
    x = dense(x)
    bits = np.unpackbits(array_of(mask), count=x.numel(), bitorder="little").view(np.bool_)
    return torch.from_numpy(bits).as_strided(x.shape, x.stride())


def _channels(tensor: Tensor | None, x: Tensor) -> Any:
    """Return a per-channel tensor as an array that the operators take, or None."""
    tensor = wide(tensor, x)
    return None if tensor is None else array_of(tensor)
