"""The forward pass of a Keras layer in training, for PyTorch tensors."""

from __future__ import annotations

from typing import Any

from backnorm.arithmetics import Arithmetic
from backnorm.errors import ArgumentValueError
from backnorm.torch import library, synchronised
from backnorm.torch.memory import statistics_type
from backnorm.torch.options import options_of


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
    """Return y, mean and biased variance.

    y can be differentiated; mean and variance have no gradients. In memory, y has the same order of
    axes as x.
    """
    # Tensors on PyTorch's meta device are accepted because Keras calls this function with such
    # tensors to find the shapes of the results.
    if x.device.type not in ("cpu", "meta"):
        raise ArgumentValueError(
            "inputs",
            "must be on the CPU, the only PyTorch device that backnorm.keras supports",
            came=f"a tensor on {x.device}",
            accepted="a tensor on the CPU",
            hint="set KERAS_TORCH_DEVICE=cpu, or use keras.layers.BatchNormalization",
        )
    # `movedim` makes the channels the second axis without a copy: it returns a view, which the
    # kernels read in place.
    x = x.movedim(axis, 1)
    options = options_of(True, epsilon, None, arithmetic, x.dtype)
    if reproducible:
        alone = synchronised.ALONE
        y, moments = synchronised.batch_norm_with_moments(x, gamma, beta, options, alone)
        mean, variance = moments[:-1].to(statistics_type(x.dtype)).chunk(2)
    else:
        y, mean, variance = library.batch_norm(x, gamma, beta, epsilon, options.arithmetic)
    return y.movedim(1, axis), mean, variance
