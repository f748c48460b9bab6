"""The operations on arrays with the channels at any axis; no TensorFlow in here.

Arrays that are new begin where TensorFlow takes them without a copy.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import numpy as np

from backnorm.arithmetics import Arithmetic, own_arithmetic
from backnorm.arrays import NumPy
from backnorm.executable import operation
from backnorm.second_order import arrays
from backnorm.tensorflow.memory import empty

__all__ = ["Options", "backward", "double_backward", "forward", "inference"]

_Optional = np.ndarray | None
_Arrays = tuple[np.ndarray, ...]


class Options(NamedTuple):
    """What a call has beside its tensors.

    Attributes
    ----------
    epsilon : float
    axis : int
        Not negative, where x's rank is known.
    arithmetic : {"float32", "float64"} or None
        What was asked for when the call was made, or traced; it holds for its gradients, too.
        None: what kernels and formulas have without that.
    training : bool
    """

    epsilon: float
    axis: int
    arithmetic: Arithmetic | None
    training: bool = True

    def of_kernels(self, dtype: np.dtype) -> Arithmetic:
        """Return the arithmetic of kernels for elements of a type, whatever holds by now."""
        return self.arithmetic or own_arithmetic(dtype)


class _Aligned(NumPy):
    code = NumPy.code._replace(
        arrays="tensorflow",
        new={
            "data": "aligned(shape, dtype)",
            "channel": "empty(channels, statistics)",
        },
    )
    names: ClassVar[dict[str, Any]] = {**NumPy.names, "aligned": empty}


_ALIGNED = _Aligned()
_forward, _inference = operation("forward", _ALIGNED), operation("inference", _ALIGNED)
_backward = operation("backward", _ALIGNED)


def forward(x: np.ndarray, gamma: _Optional, beta: _Optional, options: Options) -> _Arrays:
    """Return y, mean and variance."""
    how = options.epsilon, (options.axis,), False, options.of_kernels(x.dtype)
    return _forward(x, None, gamma, beta, None, None, *how)[:3]


def inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    beta: _Optional,
    options: Options,
) -> _Arrays:
    """Return y."""
    how = options.epsilon, (options.axis,), False, options.of_kernels(x.dtype)
    return _inference(x, None, mean, variance, gamma, beta, *how)


def backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: _Optional,
    options: Options,
) -> _Arrays:
    """Return dx, dgamma and dbeta."""
    how = options.epsilon, (options.axis,), options.training, False, options.of_kernels(x.dtype)
    return _backward(x, dy, None, mean, variance, gamma, *how)[:3]


def double_backward(*given: Any) -> _Arrays:
    """Return the gradients of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta> to x, dy, gamma.

    Takes the operands of `backward`, ddx, ddgamma and ddbeta, and the options.
    """
    x, dy, *channels, ddx, ddgamma, ddbeta, options = given
    return arrays.double_backward(
        (x, dy, ddx),
        (*channels, ddgamma, ddbeta),
        epsilon=options.epsilon,
        data_format=(options.axis,),
        training=options.training,
    )
