"""Reproducible sums by PyTorch's operators, for devices whose kernels do not compute them.

The results are the integers that `backnorm_kernels.kernels.bins` writes, bit for bit
(`binned.bins_of`). All operations are in float64; together they make some forty passes over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backnorm import binned


def of_forward(x: Tensor) -> tuple[Tensor, int]:
    """Return the bins of sum(x) and sum(x^2), and the number of elements per channel.

    The bins of both sums are one int64 tensor of shape (rows, C), as described in `binned`.
    """
    wide = _channels_first(x).double()
    return _both(wide, wide, x)


def of_backward(x: Tensor, dy: Tensor, counts: Tensor | None, mean: Tensor) -> tuple[Tensor, int]:
    """Return the bins of sum(dy) and of sum(dy * (x - mean)), in the form that `of_forward`
    returns.

    Elements where `counts` is False are left out of the sums: their dy is replaced by 0.
    """
    if counts is not None:
        dy = torch.where(counts, dy, torch.zeros_like(dy))
    centred = _channels_first(x).double() - mean.double()[:, None]
    return _both(_channels_first(dy).double(), centred, x)


def _channels_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def _both(slope: Tensor, centred: Tensor, x: Tensor) -> tuple[Tensor, int]:
    return binned.bins_of(slope, centred, x.element_size(), torch), slope.shape[1]
