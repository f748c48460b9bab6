"""The operations on arrays with the channels at any axis; no TensorFlow in here.

New arrays are aligned so that TensorFlow takes them without a copy.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, NamedTuple

import numpy as np

from backnorm import binned
from backnorm.allocation import aligned
from backnorm.arithmetics import Arithmetic, own_arithmetic
from backnorm.arrays import NumPy
from backnorm.cpu.scratch import bin_rows
from backnorm.dtypes import FLOAT64
from backnorm.executable import operation
from backnorm.second_order import arrays

__all__ = [
    "Options",
    "apply_binned_moments",
    "apply_binned_sums",
    "apply_moments",
    "apply_sums",
    "backward",
    "binned_moments",
    "binned_sums",
    "double_backward",
    "forward",
    "inference",
    "moments",
    "sums",
]

_Optional = np.ndarray | None
_Arrays = tuple[np.ndarray, ...]


class Options(NamedTuple):
    """The arguments of a call that are not tensors.

    Attributes
    ----------
    epsilon : float
    axis : int
        Not negative if x's rank is known.
    arithmetic : {"float32", "float64"} or None
        The compute dtype that was set when the call was made, or traced; its gradients use the
        same. None: the default of the element type.
    training : bool
    reproducible : bool
        Whether sums have the same bits however the batch is cut, ordered and laid out.
    """

    epsilon: float
    axis: int
    arithmetic: Arithmetic | None
    training: bool = True
    reproducible: bool = False

    def of_kernels(self, dtype: np.dtype) -> Arithmetic:
        """Return the compute dtype of kernels, which does not depend on the current setting."""
        return self.arithmetic or own_arithmetic(dtype)


class _Aligned(NumPy):
    code = NumPy.code._replace(
        arrays="tensorflow",
        new={
            **NumPy.code.new,
            "data": "aligned(shape, dtype)",
            "channel": "empty(channels, statistics)",
        },
    )
    names: ClassVar[dict[str, Any]] = {**NumPy.names, "aligned": aligned}


_ALIGNED = _Aligned()
_forward, _inference = operation("forward", _ALIGNED), operation("inference", _ALIGNED)
_backward = operation("backward", _ALIGNED)
_reduce_forward = operation("reduce_forward", _ALIGNED, exchanged=True)
_apply_forward = operation("apply_forward", _ALIGNED, exchanged=True)
_reduce = operation("reduce", _ALIGNED, exchanged=True)
_apply = operation("apply", _ALIGNED, exchanged=True)
_apply_backward = operation("apply_backward", _ALIGNED, exchanged=True)


def forward(x: np.ndarray, gamma: _Optional, beta: _Optional, options: Options) -> _Arrays:
    """Return y, mean and variance."""
    values = options.epsilon, (options.axis,), None, options.of_kernels(x.dtype)
    return _forward(x, None, gamma, beta, None, None, *values, options.reproducible)[:3]


def inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    beta: _Optional,
    options: Options,
) -> _Arrays:
    """Return y."""
    values = options.epsilon, (options.axis,), None, options.of_kernels(x.dtype)
    return _inference(x, None, mean, variance, gamma, beta, *values)


def backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    options: Options,
) -> _Arrays:
    """Return dx, dgamma and dbeta."""
    arithmetic, reproducible = options.of_kernels(x.dtype), options.reproducible
    values = options.epsilon, (options.axis,), options.training, False, arithmetic, reproducible
    return _backward(x, dy, None, mean, variance, gamma, *values)[:3]


def double_backward(*arguments: Any) -> _Arrays:
    """Return the gradients of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta> to x, dy, gamma.

    The arguments are the operands of `backward`, ddx, ddgamma and ddbeta, and the options.
    """
    x, dy, *channels, ddx, ddgamma, ddbeta, options = arguments
    return arrays.double_backward(
        (x, dy, ddx),
        (*channels, ddgamma, ddbeta),
        epsilon=options.epsilon,
        data_format=(options.axis,),
        training=options.training,
    )


def moments(x: np.ndarray, options: Options) -> _Arrays:
    """Return means and biased variances of x, float64; 0 without elements."""
    return tuple(_reduce_forward(x, (options.axis,), options.of_kernels(x.dtype), False)[0])


def binned_moments(x: np.ndarray, options: Options) -> _Arrays:
    """Return the bins of x, as in `ReproducibleMoments`."""
    return _reduce_forward(x, (options.axis,), options.of_kernels(x.dtype), True)[:1]


def apply_moments(
    x: np.ndarray,
    gamma: _Optional,
    beta: _Optional,
    mean: np.ndarray,
    variance: np.ndarray,
    options: Options,
) -> _Arrays:
    """Return y of a part, and mean and variance of the whole, each rounded once.

    `mean` and `variance` of the whole are float64.
    """
    values = options.epsilon, (options.axis,), None, options.of_kernels(x.dtype), False
    return _apply_forward(x, None, gamma, beta, *values, sums=(mean, variance))[:3]


def apply_binned_moments(
    x: np.ndarray, gamma: _Optional, beta: _Optional, parts: np.ndarray, options: Options
) -> _Arrays:
    """Return y of a part, and mean and variance of the whole, each rounded once.

    `parts` has a row for each part of the whole: its bins, and its elements of a channel.
    """
    values = options.epsilon, (options.axis,), None, options.of_kernels(x.dtype), True
    return _apply_forward(x, None, gamma, beta, *values, **_whole(parts, x))[:3]


def sums(x: np.ndarray, dy: np.ndarray, mean: np.ndarray, options: Options) -> _Arrays:
    """Return sums of dy and of dy * (x - mean), float64."""
    values = (options.axis,), options.of_kernels(x.dtype), False
    return tuple(_reduce(x, dy, None, mean, *values)[0])


def binned_sums(x: np.ndarray, dy: np.ndarray, mean: np.ndarray, options: Options) -> _Arrays:
    """Return the bins of dy and of dy * (x - mean), as in `ReproducibleSums`."""
    values = (options.axis,), options.of_kernels(x.dtype), True
    return _reduce(x, dy, None, mean, *values)[:1]


def apply_sums(*arguments: Any) -> _Arrays:
    """Return dx of a part, from the sums of the whole and the number of elements of a channel.

    The arguments are the operands of `backward`, sum_dy, sum_dy_xmu and count, and the options.
    """
    x, dy, mean, variance, gamma, sum_dy, sum_dy_xmu, count, options = arguments
    values = options.epsilon, (options.axis,), True, False, options.of_kernels(x.dtype)
    whole = {"sums": (sum_dy, sum_dy_xmu), "count": int(count)}
    return _apply(x, dy, None, mean, variance, gamma, *values, **whole)[:1]


def apply_binned_sums(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    parts: np.ndarray,
    options: Options,
) -> _Arrays:
    """Return dx of a part, and dgamma and dbeta of the whole, each rounded once.

    `parts` has a row for each part of the whole: its bins, and its elements of a channel.
    """
    values = options.epsilon, (options.axis,), True, options.of_kernels(x.dtype), True
    return _apply_backward(x, dy, mean, variance, gamma, *values, **_whole(parts, x))


def _whole(parts: np.ndarray, x: np.ndarray) -> dict[str, Any]:
    """Return the sums of all parts and their number of elements, as the numbers of a phase.

    Kernels round the sums: NumPy would flush subnormal numbers to 0 on TensorFlow's threads.
    """
    bins = parts[:, :-1].reshape(len(parts), bin_rows(x.itemsize), -1)
    whole = functools.reduce(functools.partial(binned.added, xp=np), bins)
    count = int(parts[:, -1].sum())
    binned.check_count("x", count)
    # Sums of no elements are zero, whatever they are divided by.
    return {"sums": whole.view(FLOAT64), "count": max(count, 1)}
