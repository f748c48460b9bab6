"""The `reference` of a definition in the schema of flashinfer-bench: the forward pass."""

import torch


def run(
    x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return y, and the batch's mean and biased variance, computed in float64; x is (N, C, L)."""
    g, b = (each.double()[None, :, None] for each in (gamma, beta))
    wide = x.double()
    mean = wide.mean((0, 2), keepdim=True)
    variance = (wide - mean).square().mean((0, 2), keepdim=True)
    y = g * ((wide - mean) / torch.sqrt(variance + epsilon)) + b
    return y.to(x.dtype), mean.flatten().to(gamma.dtype), variance.flatten().to(gamma.dtype)
