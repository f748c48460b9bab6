"""The kernels by way of Python, for a jaxlib whose foreign function interface is not known.

A callback takes the GIL and copies, and JAX's has been reported to block for ever where a process
makes several at once (JAX issues 24219, 24255, 25861). It is not taken where `ffi` can be.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from backnorm.cpu.threads import apart
from backnorm.executable import executable
from backnorm.jax import ffi
from backnorm.problem import Problem
from backnorm.signature import SIGNATURES

__all__ = ["call"]


def call(
    problem: Problem,
    operands: Mapping[str, jax.Array],
    results: Sequence[jax.Array],
    *,
    instances: int | None,
    spread: Sequence[bool],
    count: int,
) -> Sequence[jax.Array]:
    """Return the results of a problem, or of several instances of it: see `ffi.call`.

    Of a whole batch: parts of one are not computed this way.
    """
    _warn()
    assert count == problem.count
    kinds = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    function = functools.partial(_computed, problem, tuple(operands), instances, tuple(spread))
    found: Sequence[jax.Array] = jax.pure_callback(function, kinds, *operands.values())
    return found


def _computed(
    problem: Problem,
    names: tuple[str, ...],
    instances: int | None,
    spread: tuple[bool, ...],
    *given: Any,
) -> list[np.ndarray]:
    arrays = [np.asarray(array) for array in given]
    # On a thread of XLA.
    with apart():
        if instances is None:
            return _one(problem, names, arrays)
        pairs = list(zip(arrays, spread, strict=True))
        each = [
            _one(problem, names, [array[k] if has else array for array, has in pairs])
            for k in range(instances)
        ]
    return [np.stack(results) for results in zip(*each, strict=True)]


def _one(problem: Problem, names: tuple[str, ...], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return the results of one instance, in the shape of the caller's x."""
    signature = SIGNATURES[problem.operation]
    data = {operand.name for operand in signature.operands if operand.kind == "data"}
    given = {
        name: array.reshape(problem.shape) if name in data else array
        for name, array in zip(names, arrays, strict=True)
    }
    first, *channels = executable(problem).run(*signature.arranged(given))
    return [first.reshape(arrays[0].shape), *(each for each in channels if each is not None)]


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"backnorm calls its kernels through Python: {ffi.reason_against()}. This takes the GIL "
        "and copies the arrays.",
        RuntimeWarning,
        stacklevel=2,
    )
