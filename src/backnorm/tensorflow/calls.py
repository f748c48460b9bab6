"""The operations on NumPy arrays with any channel axis.

Each function takes the operands of a call and its options. New arrays are aligned, so that
TensorFlow does not copy them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from backnorm import engines
from backnorm.allocation import aligned
from backnorm.arithmetics import Arithmetic, own_arithmetic
from backnorm.arrays import NumPy
from backnorm.engines import Place
from backnorm.errors import BacknormError
from backnorm.executable import operation
from backnorm.second_order import arrays

#: The operands of a call (None for an absent operand), or its results.
Arrays = Sequence[Any]


class Options(NamedTuple):
    """The arguments of a call that are not tensors.

    Attributes
    ----------
    epsilon : float
    axis : int
        Not negative if x's rank is known.
    arithmetic : {"float32", "float64"} or None
        The compute dtype of the call and its gradients, set when the call was made or traced.
        None: the default of the element type.
    training : bool
    reproducible : bool
        Whether sums have the same bits for every order and layout of the batch.
    """

    epsilon: float
    axis: int
    arithmetic: Arithmetic | None
    training: bool = True
    reproducible: bool = False

    def of_kernels(self, dtype: np.dtype) -> tuple[tuple[int], Arithmetic, bool]:
        """Return the kernels' options: channel axes, compute dtype, whether sums are reproducible.

        The compute dtype does not depend on the `with backnorm.arithmetic(...)` block that is
        active when this method runs.
        """
        return (self.axis,), self.arithmetic or own_arithmetic(dtype), self.reproducible


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

    def place(self, x: np.ndarray | None) -> Place:
        engines.kernels("tensors of TensorFlow")
        return engines.place()


_ALIGNED = _Aligned()
_forward, _inference = operation("forward", _ALIGNED), operation("inference", _ALIGNED)
_backward = operation("backward", _ALIGNED)


def forward(operands: Arrays, options: Options) -> Arrays:
    """Return y, mean and variance from x, gamma and beta."""
    x, gamma, beta = operands
    axis, *sums = options.of_kernels(x.dtype)
    return _forward(x, None, gamma, beta, None, None, options.epsilon, axis, None, *sums)[:3]


def inference(operands: Arrays, options: Options) -> Arrays:
    """Return y from x, mean, variance, gamma and beta."""
    x, *channels = operands
    axis, arithmetic, _ = options.of_kernels(x.dtype)
    return _inference(x, None, *channels, options.epsilon, axis, None, arithmetic)


def backward(operands: Arrays, options: Options) -> Arrays:
    """Return dx, dgamma and dbeta from x, dy, mean, variance and gamma."""
    x, dy, *channels = operands
    axis, *sums = options.of_kernels(x.dtype)
    values = options.epsilon, axis, options.training, False, *sums
    return _backward(x, dy, None, *channels, *values)[:3]


def double_backward(operands: Arrays, options: Options) -> Arrays:
    """Return the second-order gradients with respect to x, dy and gamma.

    They are the gradients of <ddx, dx> + <ddgamma, dgamma> + <ddbeta, dbeta>, where <a, b> is the
    sum of the products a * b of all elements. The operands are those of `backward`, followed by
    ddx, ddgamma and ddbeta.
    """
    x, dy, *channels, ddx, ddgamma, ddbeta = operands
    return arrays.double_backward(
        (x, dy, ddx),
        (*channels, ddgamma, ddbeta),
        epsilon=options.epsilon,
        data_format=(options.axis,),
        training=options.training,
    )


def refuse(message: str, count: int, operands: Arrays, options: Options) -> Arrays:
    """Return zeros like the first `count` operands; raise if one of the others is not zero."""
    if any(np.any(each) for each in operands[count:]):
        raise BacknormError(message)
    return [np.zeros_like(each) for each in operands[:count] if each is not None]
