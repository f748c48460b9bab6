"""Gradients of the backward pass by PyTorch's own operators, where there is no kernel for them."""

from __future__ import annotations

import torch
from torch import Tensor

from backnorm.torch.memory import as_type

__all__ = ["double_backward"]


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
    """Return the gradients of x, dy and weight, given those of what the backward pass returns.

    `backnorm.batch_norm_double_backward` has the formulas. In float64 everywhere.
    """
    axes = [axis for axis in range(x.dim()) if axis != 1]
    count = max(1, x.numel() // max(1, x.shape[1]))

    def spread(channels: Tensor) -> Tensor:
        return channels.double().view(1, -1, *[1] * (x.dim() - 2))

    def sums(elements: Tensor) -> Tensor:
        return elements.sum(axes, keepdim=True)

    s = (spread(variance) + eps).rsqrt()
    gain = s if weight is None else s * spread(weight)
    h = (x.detach().double() - spread(mean)) * s
    dy64 = dy.detach().double()
    gx, gdy = torch.zeros_like(h), torch.zeros_like(h)
    gweight = torch.zeros_like(s)
    centred = dy64 - sums(dy64) / count if training else dy64
    q = sums(dy64 * h)
    if ddx is not None:
        v = ddx.detach().double()
        if training:
            flat = v - sums(v) / count
            r, p = sums(flat * dy64), sums(v * h)
            gx = gain * s / count * (h * (3 * p * q / count - r) - p * centred - q * flat)
            gdy = gain * (flat - h * (p / count))
            gweight = s * (r - p * q / count)
        else:
            gdy = gain * v
            gweight = s * sums(v * dy64)
    if ddweight is not None:
        share = spread(ddweight) * s
        gx = gx + share * (centred - h * (q / count) if training else dy64)
        gdy = gdy + spread(ddweight) * h
    if ddbias is not None:
        gdy = gdy + spread(ddbias)
    gweight = gweight.flatten().to(mean.dtype)
    return (
        torch.empty_like(x).copy_(gx),
        torch.empty_like(x).copy_(gdy),
        as_type(weight, gweight),
    )
