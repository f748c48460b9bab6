"""The training forward on PyTorch's tensors as Keras calls it: any axis, statistics returned."""

from __future__ import annotations

from typing import Any

from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.torch import arithmetics, operations, synchronised
from backnorm.torch.statistics import statistics_type

__all__ = ["batch_norm"]


def batch_norm(
    x: Any,
    gamma: Any,
    beta: Any,
    *,
    epsilon: float,
    axis: int,
    arithmetic: Arithmetic | None,
    reproducible: bool = False,
) -> tuple[Any, Any, Any]:
    """Return y, mean and biased variance; y lies in memory as x does, gradients are those of y."""
    # Keras traces shapes with tensors on PyTorch's meta device.
    if x.device.type not in ("cpu", "meta"):
        raise ArgumentValueError(
            "inputs",
            "must be on the CPU, where alone backnorm computes for PyTorch",
            came=f"a tensor on {x.device}",
            accepted="a tensor on the CPU",
            hint="set KERAS_TORCH_DEVICE=cpu, or use keras.layers.BatchNormalization",
        )
    # With the channels last this is a view of a kind that the kernels take as it is.
    x = x.movedim(axis, 1)
    how = epsilon, False, arithmetics.of_call(x.dtype, arithmetic)
    if reproducible:
        epsilon, relu, computed_in = how
        y, moments = synchronised.batch_norm_with_moments(
            x, None, gamma, beta, epsilon, relu, None, computed_in,
            True, None, "a layer of backnorm.keras",
        )  # fmt: skip
        moments = moments[:-1].to(statistics_type(x.dtype))
        mean, variance = moments.chunk(2)
    else:
        y, mean, variance = operations.batch_norm(x, None, gamma, beta, *how)
    return y.movedim(1, axis), mean, variance
