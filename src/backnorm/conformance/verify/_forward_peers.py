"""Forward passes of other packages, as functions that are called like
`backnorm.batch_norm_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

import backnorm
from backnorm.conformance.verify._peers import torch_tensor
from backnorm.dtypes import element_type, is_16_bit

Results = tuple[Any, ...]


def textbook(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
) -> Results:
    """Return y, mean and variance, computed by NumPy in float32 (in float64 if x is float64)."""
    wide: Any = np.float64 if element_type(x.dtype) == np.float64 else np.float32
    axis = 1 if data_format == "NCX" else x.ndim - 1
    others = tuple(k for k in range(x.ndim) if k != axis)
    kept = [size if k == axis else 1 for k, size in enumerate(x.shape)]
    v = x.astype(wide)
    mean = v.mean(others, keepdims=True)
    variance = v.var(others, keepdims=True)
    y = (v - mean) / np.sqrt(variance + wide(epsilon))
    if gamma is not None and beta is not None:
        y = y * gamma.astype(wide).reshape(kept) + beta.astype(wide).reshape(kept)
    statistics = wide if gamma is None else gamma.dtype
    return y.astype(x.dtype), *(each.reshape(-1).astype(statistics) for each in (mean, variance))


def torch(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    epsilon: float,
    data_format: str,
) -> Results:
    """Return y and the mean of PyTorch's native_batch_norm on the CPU.

    PyTorch returns the inverse standard deviation instead of the variance, so only y and the mean
    are judged. PyTorch expects the channels on axis 1, so x in the format NXC is passed as a
    permuted view.
    """
    import torch as framework

    weight, bias = (None if a is None else torch_tensor(a) for a in (gamma, beta))
    if weight is None and is_16_bit(x.dtype):
        # If the weight is None, PyTorch returns the mean in x's 16-bit type. With these float32
        # parameters it returns the mean in float32.
        channels = x.shape[1 if data_format == "NCX" else -1]
        weight, bias = framework.ones(channels), framework.zeros(channels)
    tensor = torch_tensor(x)
    if data_format == "NXC":
        tensor = tensor.movedim(-1, 1)
    y, mean, _ = framework.ops.aten.native_batch_norm(
        tensor, weight, bias, None, None, True, 0.0, epsilon
    )
    return (y.movedim(1, -1) if data_format == "NXC" else y), mean


def own(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    *,
    epsilon: float,
    data_format: Any,
) -> Results:
    """Return the results of backnorm, in the arithmetic that a `with arithmetic` block sets."""
    return backnorm.batch_norm_forward(x, gamma, beta, epsilon=epsilon, data_format=data_format)


#: Maps each name that ``backnorm verify`` accepts for a peer (a known function) to the function
#: that this name stands for.
FORWARD_PEERS: Mapping[str, Callable[..., Results]] = MappingProxyType(
    {"numpy": textbook, "torch": torch, "backnorm": own}
)

#: For each name in `FORWARD_PEERS` whose function omits results: the names of the omitted results.
FORWARD_OMITTED = MappingProxyType({"torch": ("variance",)})
