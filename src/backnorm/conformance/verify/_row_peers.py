"""Layer, RMS, group and instance normalisation of other packages, for :mod:`.peers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from backnorm.conformance.verify.operations import RefusedError
from backnorm.dtypes import FLOAT32, is_16_bit
from backnorm.peers import onednn
from backnorm.peers.torch_tensors import to_tensor


def aten_of_rows(op: str) -> Callable[..., Any]:
    """Return a function of NumPy's arrays that calls an operator of ATen on the CPU."""

    def call(*operands: Any) -> Any:
        import torch

        tensors = (to_tensor(a) if isinstance(a, np.ndarray) else a for a in operands)
        return getattr(torch.ops.aten, op)(*tensors)

    return call


def aten_of_instances(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, *, epsilon: float
) -> tuple[Any, ...]:
    """Return the gradients that PyTorch derives for instance_norm, from its own steps: those of
    batch normalisation of the channels of all images, with a repeated gamma.
    """
    import torch

    if is_16_bit(mean.dtype):
        raise RefusedError("an inverse deviation of 16 bits is not the one that is judged")
    images, channels = x.shape[:2]
    scale = np.ones(channels, mean.dtype) if gamma is None else gamma
    first, last = (to_tensor(each).reshape(1, -1, *x.shape[2:]) for each in (dy, x))
    known, spread, weight = map(to_tensor, (mean.ravel(), variance.ravel(), scale))
    inverse = (spread.double() + epsilon).rsqrt().to(spread.dtype)
    dx, *sums = torch.ops.aten.native_batch_norm_backward(
        first, last, weight.repeat(images), None, None, known, inverse, True, epsilon, [True] * 3
    )
    return dx.reshape(x.shape), *(each.reshape(images, channels).sum(0) for each in sums)


def onednn_graph_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, beta: Any, *,
    begin_norm_axis: int, use_affine: bool, epsilon: float,
) -> list[np.ndarray]:  # fmt: skip
    """Return the gradients of oneDNN Graph's LayerNormBackward on the CPU."""
    if x.ndim > 5:
        # A C++ exception escapes from dnnl_graph_partition_compile.
        raise RefusedError("version 3.2.0 ends the process for rank 6")
    if gamma is None:
        gamma, beta = np.ones(x.shape[-1], mean.dtype), np.zeros(x.shape[-1], mean.dtype)
    results = [np.empty_like(each) for each in (x, gamma, beta)]
    operands = x, dy, mean, variance, gamma, beta
    try:
        library = onednn.Library(1)
        onednn.run_operator(library, "LayerNormBackward", {"epsilon": epsilon}, operands, results)
    except onednn.StatusError as error:
        raise RefusedError(f"{error} for {x.dtype}") from None
    return results


def onednn_forward(x: Any, gamma: Any, beta: Any, *, epsilon: float) -> tuple[np.ndarray, ...]:
    """Return y, mean and variance of oneDNN's primitive for layer normalisation."""
    usual = np.ones(x.shape[-1], FLOAT32), np.zeros(x.shape[-1], FLOAT32)
    scale, shift = usual if gamma is None else (gamma, beta)
    if scale.dtype != FLOAT32:
        raise RefusedError(f"oneDNN's statistics are float32, not {scale.dtype}")
    mean, variance = np.empty((2, *x.shape[:-1]), FLOAT32)
    arrays = {"src": x, "dst": np.empty_like(x), "mean": mean, "variance": variance}
    arrays |= {"scale": scale, "shift": shift}
    try:
        onednn.Primitive(onednn.Library(1), arrays, epsilon, training=True, kind="layer")()
    except onednn.StatusError as error:
        raise RefusedError(f"{error} for {x.dtype}") from None
    return arrays["dst"], mean, variance
