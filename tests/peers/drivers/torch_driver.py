"""PyTorch's native_batch_norm_backward on the CPU; NXC runs as channels_last."""

from __future__ import annotations

import numpy as np
import torch
from protocol import serve


def tensor(array, data_format):
    if data_format == "NCX":
        return torch.from_numpy(array)
    return torch.from_numpy(array).permute(0, 3, 1, 2)


def backward(case, x, dy, mean, variance, gamma):
    data_format = case["data_format"]
    mean, variance, gamma = (torch.from_numpy(value) for value in (mean, variance, gamma))
    inverse_deviation = 1.0 / torch.sqrt(variance.double() + case["epsilon"])
    dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
        tensor(dy, data_format),
        tensor(x, data_format),
        gamma,
        mean,
        variance,
        mean,
        inverse_deviation.to(variance.dtype),
        case["training"],
        case["epsilon"],
        [True, True, True],
    )
    if data_format == "NXC":
        assert dx.is_contiguous(memory_format=torch.channels_last)
        dx = dx.permute(0, 2, 3, 1)
    return [np.ascontiguousarray(value.numpy()) for value in (dx, dgamma, dbeta)]


serve(backward)
