"""The `reference` of a definition in the schema of flashinfer-bench: the backward pass."""

import torch


def run(
    x: torch.Tensor,
    dy: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    gamma: torch.Tensor,
    epsilon: float,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dx, dgamma and dbeta, computed in float64; x and dy are (N, C, L).

    If `training` is false, mean and variance are constants, so dx has only its first term.
    """
    m, v, g = (each.double()[None, :, None] for each in (mean, variance, gamma))
    wide, s = dy.double(), 1 / torch.sqrt(v + epsilon)
    normalized = (x.double() - m) * s
    dbeta = wide.sum((0, 2), keepdim=True)
    dgamma = (wide * normalized).sum((0, 2), keepdim=True)
    count = x.shape[0] * x.shape[2]
    dx = g * s * (wide - (dbeta + normalized * dgamma) / count if training else wide)
    return dx.to(x.dtype), dgamma.flatten().to(gamma.dtype), dbeta.flatten().to(gamma.dtype)
