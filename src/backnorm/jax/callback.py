"""The kernels by way of Python, for a jaxlib whose foreign function interface is not known.

A callback takes the GIL and copies, and JAX's has been reported to block for ever where a process
makes several at once (JAX issues 24219, 24255, 25861). It is not taken where `ffi` can be.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from backnorm import operators
from backnorm.cpu.threads import apart
from backnorm.jax import ffi
from backnorm.problem import Problem

__all__ = ["call"]


def call(
    problem: Problem,
    operands: Sequence[jax.Array],
    results: Sequence[jax.Array],
    *,
    instances: int | None,
    spread: Sequence[bool],
) -> Sequence[jax.Array]:
    """Return the results of a problem, or of several instances of it: see `ffi.call`."""
    _warn()
    kinds = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    function = functools.partial(_computed, problem, instances, tuple(spread))
    found: Sequence[jax.Array] = jax.pure_callback(function, kinds, *operands)
    return found


def _computed(
    problem: Problem, instances: int | None, spread: tuple[bool, ...], *given: Any
) -> list[np.ndarray]:
    arrays = [np.asarray(array) for array in given]
    # On a thread of XLA.
    with apart():
        if instances is None:
            return _one(problem, arrays)
        pairs = list(zip(arrays, spread, strict=True))
        each = [
            _one(problem, [array[k] if has else array for array, has in pairs])
            for k in range(instances)
        ]
    return [np.stack(results) for results in zip(*each, strict=True)]


def _one(problem: Problem, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the results of one instance, in the shape of the caller's x."""
    shape, count = arrays[0].shape, 2 if problem.operation == "backward" else 1
    data = [array.reshape(problem.shape) for array in arrays[:count]]
    given, epsilon = (*data, *arrays[count:]), problem.epsilon
    found: tuple[np.ndarray, ...]
    if problem.operation == "backward":
        training = problem.training
        found = operators.batch_norm_backward(*given, epsilon=epsilon, training=training)
    elif problem.operation == "forward":
        found = operators.batch_norm_forward(*given, epsilon=epsilon)
    else:
        found = (operators.batch_norm_inference(*given, epsilon=epsilon),)
    return [found[0].reshape(shape), *found[1:]]


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"backnorm calls its kernels through Python: {ffi.reason_against()}. This takes the GIL "
        "and copies the arrays.",
        RuntimeWarning,
        stacklevel=2,
    )
