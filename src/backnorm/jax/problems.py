"""The options of a call, the problem that kernels solve, and the warning if kernels cannot run."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from backnorm.activations import Activation
from backnorm.arithmetics import Arithmetic, own_arithmetic
from backnorm.problem import Problem
from backnorm.signature import Operation

#: For each operation, the names of the operands that its primitive and its kernel take. The names
#: are those of the operation's signature. In a backward pass, the operand `sums` has the sums of
#: the whole batch; in a forward pass, it has the moments of the whole batch. These sums or moments
#: were combined from those of the parts of the batch.
OPERANDS: dict[Operation, tuple[str, ...]] = {
    "forward": ("x", "gamma", "beta"),
    "inference": ("x", "mean", "variance", "gamma", "beta"),
    "backward": ("x", "dy", "mean", "variance", "gamma"),
    # Each of the following operations is one phase of a forward or backward pass, computed for one
    # part of the batch.
    "reduce_forward": ("x",),
    "apply_forward": ("x", "gamma", "beta", "sums"),
    "reduce": ("x", "dy", "mean"),
    "apply_backward": ("x", "dy", "mean", "variance", "gamma", "sums"),
}


class Options(NamedTuple):
    """The arguments of a call that are not arrays; part of the cache key of a compiled function.

    Attributes
    ----------
    epsilon : float
    axis : int
        The channel axis of one problem (without batch axes of `jax.vmap`), not negative.
    arithmetic : {"float32", "float64"} or None
        The requested compute dtype. None: the default of the kernels or of the formulas.
    reproducible : bool
        Whether sums have the same bits however the batch is split.
    training : bool
        Whether the statistics are functions of x; used only in the backward pass.
    """

    epsilon: float
    axis: int
    arithmetic: Arithmetic | None = None
    reproducible: bool = False
    training: bool = True


def is_known(shape: Sequence[Any]) -> bool:
    """Whether all sizes of a shape are known while tracing, and none of them is 0."""
    return all(isinstance(size, int) for size in shape) and math.prod(shape) > 0


def problem_of(
    operation: Operation,
    operands: Sequence[Any],
    options: Options,
    activation: Activation | None = None,
) -> Problem:
    """Return the problem of one entry of a `jax.vmap` batch; those of all entries are equal.

    The problem has the shape (outer, channels, inner). `operands` are the arrays that `OPERANDS`
    names for the operation, each with a leading batch axis (`batching`). One more array may follow:
    the residual.
    """
    names, x = OPERANDS[operation], operands[0]
    shape, axis, dtype = x.shape[1:], options.axis, np.dtype(x.dtype)
    statistics = next((k for k in ("mean", "gamma") if k in names), "x")
    return Problem(
        operation,
        (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])),
        (1,),
        dtype,
        np.dtype(operands[names.index(statistics)].dtype),
        has_gamma="gamma" in names,
        has_beta="beta" in names,
        epsilon=options.epsilon,
        training=options.training and operation != "inference",
        activation=activation,
        residual=len(operands) > len(names),
        reproducible=options.reproducible and operation != "inference",
        arithmetic=options.arithmetic or own_arithmetic(dtype),
    )


@functools.cache
def warn_of_formulas(problem: str, reason: str) -> None:
    """Warn that jax.numpy code runs instead of kernels; once for equal `problem` and `reason`."""
    warnings.warn(
        f"backnorm cannot {problem} and runs jax.numpy code: {reason}", RuntimeWarning, stacklevel=3
    )
