"""The operations on NumPy arrays with any channel axis.

Each function takes the operands of a call and its options. New arrays are aligned, so that
TensorFlow does not copy them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from backnorm import engines
from backnorm.allocation import aligned
from backnorm.arithmetics import own_arithmetic
from backnorm.arrays import NumPy
from backnorm.engines import Place
from backnorm.errors import BacknormError
from backnorm.executable import compute
from backnorm.layout import Order
from backnorm.options import Options
from backnorm.problem import Problem
from backnorm.second_order import arrays
from backnorm.signature import Kind, Operation

#: The operands of a call (None for an absent operand), or its results.
Arrays = Sequence[Any]


class _Aligned(NumPy):
    def forms(self, problem: Problem, order: Order) -> dict[Kind, Any]:
        shape = tuple(problem.shape[axis] for axis in order)
        return {**super().forms(problem, order), "data": partial(aligned, shape, problem.dtype)}

    def place(self, x: np.ndarray | None) -> Place:
        engines.kernels("tensors of TensorFlow")
        return engines.place()


_ALIGNED = _Aligned()


def forward(operands: Arrays, options: Options) -> Arrays:
    """Return y, mean and variance from x, gamma and beta."""
    x, gamma, beta = operands
    return _compute("forward", (x, None, gamma, beta, None, None), options)[:3]


def inference(operands: Arrays, options: Options) -> Arrays:
    """Return y from x, mean, variance, gamma and beta."""
    x, *channels = operands
    return _compute("inference", (x, None, *channels), options)


def backward(operands: Arrays, options: Options) -> Arrays:
    """Return dx, dgamma and dbeta from x, dy, mean, variance and gamma."""
    x, dy, *channels = operands
    return _compute("backward", (x, dy, None, *channels), options)[:3]


def _compute(operation: Operation, operands: Arrays, options: Options) -> Arrays:
    """Compute in the arithmetic of the options, or in the default of the element type; a block
    `with backnorm.arithmetic(...)` that is active now has no effect.
    """
    arithmetic = options.arithmetic or own_arithmetic(operands[0].dtype)
    options = options._replace(arithmetic=arithmetic)
    return compute(operation, operands, options, arrays=_ALIGNED)


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
        data_format=options.data_format,
        training=options.training,
    )


def refuse(message: str, count: int, operands: Arrays, options: Options) -> Arrays:
    """Return zeros like the first `count` operands; raise if one of the others is not zero."""
    if any(np.any(each) for each in operands[count:]):
        raise BacknormError(message)
    return [np.zeros_like(each) for each in operands[:count] if each is not None]
