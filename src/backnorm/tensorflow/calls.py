"""The operators of `backnorm` on arrays with the channels at any axis; no TensorFlow in here.

Axes are moved as a view, and the kernels take an array that is dense in any order of its axes as it
is. Results are C-contiguous.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import backnorm
from backnorm.tensorflow.memory import empty

__all__ = ["Options", "backward", "double_backward", "forward", "inference"]

_Optional = np.ndarray | None
_Arrays = tuple[np.ndarray, ...]


class Options(NamedTuple):
    """What a call has beside its tensors."""

    epsilon: float
    axis: int
    training: bool = True


def forward(x: np.ndarray, gamma: _Optional, beta: _Optional, options: Options) -> _Arrays:
    """Return y, mean and variance."""
    y = empty(x.shape, x.dtype)
    result = backnorm.batch_norm_forward(
        _last(x, options),
        gamma,
        beta,
        epsilon=options.epsilon,
        data_format="NXC",
        out=_last(y, options),
    )
    return y, result.mean, result.variance


def inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    beta: _Optional,
    options: Options,
) -> _Arrays:
    """Return y."""
    y = empty(x.shape, x.dtype)
    backnorm.batch_norm_inference(
        _last(x, options),
        mean,
        variance,
        gamma,
        beta,
        epsilon=options.epsilon,
        data_format="NXC",
        out=_last(y, options),
    )
    return (y,)


def backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    options: Options,
) -> _Arrays:
    """Return dx, dgamma and dbeta."""
    dx = empty(x.shape, x.dtype)
    result = backnorm.batch_norm_backward(
        _last(x, options),
        _last(dy, options),
        mean,
        variance,
        gamma,
        epsilon=options.epsilon,
        data_format="NXC",
        training=options.training,
        out=_last(dx, options),
    )
    return dx, result.dgamma, result.dbeta


def double_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    ddx: np.ndarray,
    ddgamma: np.ndarray,
    ddbeta: np.ndarray,
    options: Options,
) -> _Arrays:
    """Return the gradients of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta> to x, dy, gamma."""
    result = backnorm.batch_norm_double_backward(
        _last(x, options),
        _last(dy, options),
        mean,
        variance,
        gamma,
        ddx=_last(ddx, options),
        ddgamma=ddgamma,
        ddbeta=ddbeta,
        epsilon=options.epsilon,
        data_format="NXC",
        training=options.training,
    )
    # Results have x's order in memory: moved back they are C-contiguous, as x is.
    back = (np.moveaxis(array, -1, options.axis) for array in (result.x, result.dy))
    return (*(np.ascontiguousarray(array) for array in back), result.gamma)


def _last(array: np.ndarray, options: Options) -> np.ndarray:
    """Return a view with the channels last."""
    last = array.ndim - 1
    return array if options.axis == last else np.moveaxis(array, options.axis, last)
