"""What a primitive is asked for, as a problem of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic, own_arithmetic
from backnorm.problem import Problem
from backnorm.signature import Operation

__all__ = ["OPERANDS", "is_known", "problem_of"]

#: The operands of the primitives, and of the kernels in their place: those of an operation's
#: signature that JAX's formulas know, and sums of all parts of a batch.
OPERANDS: dict[Operation, tuple[str, ...]] = {
    "forward": ("x", "gamma", "beta"),
    "inference": ("x", "mean", "variance", "gamma", "beta"),
    "backward": ("x", "dy", "mean", "variance", "gamma"),
    # The phases of a part of a batch.
    "reduce_forward": ("x",),
    "apply_forward": ("x", "gamma", "beta", "sums"),
    "reduce": ("x", "dy", "mean"),
    "apply_backward": ("x", "dy", "mean", "variance", "gamma", "sums"),
}


def is_known(shape: Sequence[Any]) -> bool:
    """Whether there are elements, and their number is known while tracing."""
    return all(isinstance(size, int) for size in shape) and math.prod(shape) > 0


def problem_of(
    operation: Operation,
    x: jax.Array,
    statistics: Any,
    *,
    epsilon: float,
    axis: int,
    arithmetic: Arithmetic | None,
    spread: tuple[bool, ...],
    training: bool = True,
    activation: Activation | None = None,
    residual: bool = False,
    reproducible: bool = False,
    instances: int | None,
) -> Problem:
    """Return the problem of one instance, as (outer, channels, inner).

    `statistics` is an array of the type of per-channel arrays.
    """
    shape = x.shape[1:] if spread[0] else x.shape
    return Problem(
        operation,
        (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])),
        (1,),
        np.dtype(x.dtype),
        np.dtype(statistics.dtype),
        has_gamma="gamma" in OPERANDS[operation],
        has_beta="beta" in OPERANDS[operation],
        epsilon=epsilon,
        training=training and operation != "inference",
        activation=activation,
        residual=residual,
        reproducible=reproducible,
        arithmetic=arithmetic or own_arithmetic(np.dtype(x.dtype)),
    )
