"""Kernels as custom calls of XLA: registration, and what is written into a call.

The handler that answers the calls is `backnorm.kernels.cpu.xla_ffi`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from backnorm import execute
from backnorm.jax import header
from backnorm.kernels.cpu import xla_ffi
from backnorm.kernels.cpu.xla_structures import ELEMENTS
from backnorm.problem import Problem

__all__ = ["TARGET", "call", "reason_against"]

#: The name of the handler, in the text of compiled functions too.
TARGET = "backnorm_kernel"

_lock = threading.Lock()
_registered: list[Any] = []


@functools.cache
def reason_against() -> str | None:
    """Return why kernels cannot be called by XLA here, or None if they can."""
    version = header.read(jax.ffi.include_dir())
    return version if isinstance(version, str) else None


def call(
    problem: Problem,
    operands: Sequence[jax.Array],
    slots: Sequence[int],
    results: Sequence[tuple[jax.Array, int]],
    *,
    instances: int | None,
    spread: Sequence[bool],
) -> Sequence[jax.Array]:
    """Return the results of a problem, or of several instances of it.

    Parameters
    ----------
    problem : Problem
        Of one instance.
    operands, slots
        The arrays, and where a kernel finds their addresses.
    results
        For every result, an array of its shape and type, and the slot of its address.
    instances : int or None
        How many instances there are.
    spread : sequence of bool
        Which operands have a leading axis of instances; results have one if there are any.
    """
    _register()
    stage = _stage(problem)
    name = xla_ffi.introduce(stage.key, stage.function)
    described = [
        _described(operand, slot, instances if each else None)
        for operand, slot, each in zip(operands, slots, spread, strict=True)
    ]
    described += [_described(result, slot, instances) for result, slot in results]
    kinds = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result, _ in results]
    found: Sequence[jax.Array] = jax.ffi.ffi_call(TARGET, kinds)(
        *operands,
        buffers=np.concatenate(described),
        call=np.array([name, instances or 1, stage.participants - 1], np.int64),
        record=stage.template,
    )
    return found


def _described(array: jax.Array, slot: int, instances: int | None) -> np.ndarray:
    """Return what the attribute "buffers" says of an array: see `xla_frame`."""
    dtype = np.dtype(array.dtype)
    size = array.size * dtype.itemsize
    stride = size // instances if instances else 0
    return np.array([slot, ELEMENTS[dtype.name], array.ndim, array.size, size, stride], np.int64)


def _stage(problem: Problem) -> Any:
    """Return the kernel of a problem on arrays in row-major order, as XLA gives them."""
    launch = execute.planned(problem, None).launch
    return launch.apply if problem.operation == "inference" else launch.complete


def _register() -> None:
    """Register the handler, once for the process, and keep it: XLA never forgets its address."""
    with _lock:
        if not _registered:
            version = header.read(jax.ffi.include_dir())
            assert not isinstance(version, str)
            answer = xla_ffi.handler(*version)
            capsule = jax.ffi.pycapsule(answer.ctypes)
            jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
            _registered.extend((answer, capsule))
