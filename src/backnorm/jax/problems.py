"""The problem that the arrays and the options of a call are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from backnorm import problem
from backnorm.arithmetics import own_arithmetic
from backnorm.options import Options
from backnorm.problem import Metadata, Problem
from backnorm.signature import SIGNATURES, Operation


def is_known(shape: Sequence[Any]) -> bool:
    """Whether all sizes of a shape are known while tracing, and none of them is 0."""
    return all(isinstance(size, int) for size in shape) and math.prod(shape) > 0


def problem_of(
    operation: Operation, options: Options, activation: object = None, **arrays: Any
) -> Problem:
    """Return the problem of an operation on named operands, or raise.

    Only shapes and element types of the operands are read. An absent operand may be None.
    """
    operands = {name: _metadata(array) for name, array in arrays.items() if array is not None}
    x = operands["x"]
    return problem.problem_of(
        operation,
        *SIGNATURES[operation].arranged(operands),
        epsilon=options.epsilon,
        data_format=options.data_format,
        training=options.training,
        activation=activation,
        # A block `with backnorm.arithmetic(...)` has no effect here, because this function also
        # runs when a function is lowered. `options` has the arithmetic of the call.
        arithmetic=options.arithmetic or own_arithmetic(x.dtype),
        # For reproducible sums, `problem_of` checks that a channel does not have too many elements.
        # If the shape is symbolic, the number of elements is not known, so this check is left out
        # here.
        reproducible=options.reproducible and is_known(x.shape),
    )


def _metadata(array: Any) -> Metadata:
    dtype = array.dtype
    # Some arrays, such as random keys, have an element type that only JAX has. Their `Metadata`
    # gets the type `object` instead, so that the checks reject it.
    return Metadata(array.shape, dtype if isinstance(dtype, np.dtype) else np.dtype(object))
