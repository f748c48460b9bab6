"""Implementations of others, called as the canonical function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

import backnorm
from backnorm.dtypes import BFLOAT16, element_type, is_16_bit

__all__ = ["PEERS"]

_Gradients = tuple[Any, Any, Any]


def textbook(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
) -> _Gradients:
    """Return the gradients by NumPy, in float32 for elements of at most 32 bits."""
    dtype = element_type(x.dtype)
    wide: Any = np.float64 if dtype == np.float64 else np.float32
    axis = 1 if data_format == "NCX" else x.ndim - 1
    others = tuple(k for k in range(x.ndim) if k != axis)
    kept = [size if k == axis else 1 for k, size in enumerate(x.shape)]
    m, v = (each.astype(wide).reshape(kept) for each in (mean, variance))
    g = np.ones_like(m) if gamma is None else gamma.astype(wide).reshape(kept)
    d, count = dy.astype(wide), wide(max(x.size // max(x.shape[axis], 1), 1))
    with np.errstate(all="ignore"):
        s = 1 / np.sqrt(v + wide(epsilon))
        normalized = (x.astype(wide) - m) * s
        dbeta = d.sum(others, keepdims=True)
        dgamma = (d * normalized).sum(others, keepdims=True)
        centred = d - dbeta / count - normalized * dgamma / count if training else d
        dx = g * s * centred
        return (
            dx.astype(x.dtype),
            dgamma.reshape(-1).astype(mean.dtype),
            dbeta.reshape(-1).astype(mean.dtype),
        )


def torch(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
) -> _Gradients:
    """Return the gradients of PyTorch's native_batch_norm_backward on the CPU.

    NXC is a permuted view of the memory, which PyTorch calls channels_last where it has four axes.
    """
    import torch as framework

    def tensor(array: np.ndarray) -> Any:
        if element_type(array.dtype) == BFLOAT16:
            bits = np.array(array).view(np.int16)
            return framework.from_numpy(bits).view(framework.bfloat16)
        return framework.from_numpy(np.array(array))

    inputs = [tensor(each) for each in (dy, x)]
    if data_format == "NXC":
        inputs = [each.movedim(-1, 1) for each in inputs]
    inverse = (1.0 / np.sqrt(variance.astype(np.float64) + epsilon)).astype(variance.dtype)
    statistics = [None, None, tensor(mean), tensor(inverse)]
    if not training:
        statistics = [tensor(mean), tensor(variance), None, None]
    weight = None if gamma is None else tensor(gamma)
    if weight is None and is_16_bit(x.dtype):
        # Without a weight PyTorch takes the statistics for 16-bit ones.
        weight = tensor(np.ones_like(mean))
    dx, dgamma, dbeta = framework.ops.aten.native_batch_norm_backward(
        *inputs, weight, *statistics, training, epsilon, [True, True, True]
    )
    return (dx.movedim(1, -1) if data_format == "NXC" else dx), dgamma, dbeta


def tensorflow(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
    training: bool,
) -> _Gradients:
    """Return the gradients of TensorFlow's FusedBatchNormGradV3 on the CPU."""
    import tensorflow as framework

    from backnorm.conformance.verify.subjects import RefusedError

    if data_format != "NXC" or x.ndim != 4 or x.dtype == np.float64:
        raise RefusedError("TensorFlow's kernel takes NHWC of rank 4, of at most 32 bits")
    scale = np.ones_like(mean) if gamma is None else gamma
    results = framework.raw_ops.FusedBatchNormGradV3(
        y_backprop=dy,
        x=x,
        scale=scale,
        reserve_space_1=mean,
        reserve_space_2=variance,
        reserve_space_3=np.zeros(0, np.float32),
        epsilon=epsilon,
        data_format="NHWC",
        is_training=training,
    )
    dx, dgamma, dbeta = results[:3]
    return dx.numpy(), dgamma.numpy(), dbeta.numpy()


def own(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    *,
    epsilon: float,
    data_format: Any,
    training: bool,
) -> _Gradients:
    """Return the gradients of this package, in the arithmetic that holds."""
    return backnorm.batch_norm_backward(
        x, dy, mean, variance, gamma, epsilon=epsilon, data_format=data_format, training=training
    )


#: Functions by the names of the command.
PEERS: Mapping[str, Callable[..., _Gradients]] = MappingProxyType(
    {"numpy": textbook, "torch": torch, "tensorflow": tensorflow, "backnorm": own}
)
