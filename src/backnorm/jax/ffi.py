"""Kernels on a CPU as custom calls of XLA: registration, and the attributes of a call.

The handler of the calls is `backnorm_kernels.kernels.xla_handler`. Importing `backnorm.jax` loads
the machine code of the handler and of all kernels. The code is loaded this early because the
process may run a function that another process has exported, and such a function calls the handler.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backnorm import engines
from backnorm.activations import Activation
from backnorm.errors import ArgumentValueError, MachineCodeError
from backnorm.jax.batching import batch_size
from backnorm.jax.inverse_std import is_refused
from backnorm.jax.problems import problem_of
from backnorm.layout import extents_of, mask_size
from backnorm.options import Options
from backnorm.signature import SIGNATURES, Operation

#: The name under which XLA knows the handler of kernels. A compiled function contains this name,
#: and so needs a handler with this name in every process that runs the function.
TARGET = "backnorm_kernel"

_HEADER = Path("xla") / "ffi" / "api" / "c_api.h"

_lock = threading.Lock()
_registered: list[Any] = []


# The oldest and the newest version of XLA's foreign function interface whose structures
# `xla_structures` describes. The versions of jaxlib from 0.5 to 0.11 have versions of the interface
# in this range.
_OLDEST, _NEWEST = (0, 1), (0, 4)


@functools.cache
def version() -> tuple[int, ...] | None:
    """Return the version of this jaxlib's foreign function interface, or None if it is unknown.

    jaxlib states the version only in a header file for C, which is read here. The version is
    checked before a handler is registered. If a handler of a version that XLA does not support were
    registered, JAX could not create its devices.
    """
    try:
        lines = (Path(jax.ffi.include_dir()) / _HEADER).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    definitions = (words for words in map(str.split, lines) if words[:1] == ["#define"])
    defined = {words[1]: words[2] for words in definitions if len(words) == 3}
    numbers = [defined.get(f"XLA_FFI_API_{part}", "") for part in ("MAJOR", "MINOR")]
    return tuple(map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def reason_against() -> str | None:
    """Return the reason why XLA cannot call kernels in this process, or None if it can."""
    found = version()
    if found is not None and _OLDEST <= found <= _NEWEST:
        return None
    known = " to ".join(".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
    came = "none" if found is None else ".".join(map(str, found))
    return f"the foreign function interface of this jaxlib has version {came}, expected {known}"


@functools.cache
def is_usable() -> bool:
    """Whether XLA can call kernels in this process; warn once if it cannot."""
    reason = reason_against()
    if reason is not None:
        warnings.warn(
            f"backnorm cannot call its kernels on CPUs and runs jax.numpy code: {reason}",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


def call(
    operation: Operation,
    operands: Mapping[str, jax.Array],
    results: Sequence[Any],
    options: Options,
    activation: Activation | None = None,
) -> Sequence[jax.Array]:
    """Return the results of an operation on a batch of problems (see `batching`), computed by its
    kernel.

    Parameters
    ----------
    operation : str
    operands : mapping of str to array
        By the names that the operation's signature gives to them.
    results : sequence
        For each result, an array or another value with the same shape and type.
    options : Options
    activation : Activation, optional
    """
    kernels = register()
    # The problem of one entry of the batch; those of all entries are equal.
    one = {name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in operands.items()}
    problem = problem_of(operation, options, activation, **one)
    # XLA's arrays are row-major.
    extents = extents_of(problem.shape, problem.channel_axes, tuple(range(len(problem.shape))))
    _, launch = engines.planned(problem, extents, engines.place())
    stage = launch.stage(operation)
    kernel = kernels.xla.register(stage.kind)
    arrays = dict(operands)
    if "variance" in arrays:
        # If variance + epsilon is not positive, a kernel reports an error. But compiled code does
        # not check values, so the variance of such a channel is replaced by NaN here.
        variance = arrays["variance"]
        arrays["variance"] = jnp.where(is_refused(variance, options.epsilon), jnp.nan, variance)
    signature, batch = SIGNATURES[operation], batch_size([*arrays.values()])
    fields = {operand.name: operand.field for operand in signature.operands}
    placed = [(array, fields[name]) for name, array in arrays.items()]
    types = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    written = [result.field for result in signature.results if result.option is None]
    if problem.writes_mask:
        # The mask is not returned, because it follows from y: it is set where y is positive.
        types.append(jax.ShapeDtypeStruct((batch, mask_size(problem.size)), np.uint8))
        written.append("mask")
    placed += zip(types, written, strict=True)
    values: Sequence[jax.Array] = jax.ffi.ffi_call(TARGET, types)(
        *arrays.values(),
        buffers=np.concatenate([_described(kernels, *each, batch) for each in placed]),
        call=np.array([kernel, batch, stage.participants - 1], np.int64),
        record=stage.template,
    )
    return values[: len(results)]


def _described(kernels: ModuleType, array: Any, field: str, batch: int) -> np.ndarray:
    """Return the numbers that describe an array in the attribute "buffers": see `xla_frame`."""
    dtype = np.dtype(array.dtype)
    count = math.prod(array.shape)
    stride = count * dtype.itemsize // batch if array.shape[0] == batch > 1 else 0
    slot, element = kernels.SLOTS[field], kernels.ELEMENTS[dtype.name]
    return np.array([slot, element, len(array.shape), count, stride], np.int64)


def register() -> ModuleType:
    """Register backnorm's handler (the function that XLA calls), unless it is already registered.

    The handler is kept loaded, because XLA stores its address. The engine of the kernels is
    returned; if it is not installed or not chosen, an error is raised (`engines.kernels`).
    """
    kernels = engines.kernels("arrays of JAX")
    if _registered:
        return kernels
    found = version()
    assert found is not None
    # This call is outside of the lock, because it may build the handler, which takes long.
    handler = kernels.xla.handler(*found)
    with _lock:
        if not _registered:
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(handler), platform="cpu")
            _registered.append(handler)
    return kernels


def _register_built_kernels() -> None:
    """Register the handler and built kernels: functions exported by other processes need them."""
    if reason_against() is not None:
        return
    # Importing this module compiles no kernels. If there is no machine code for this machine, the
    # import succeeds, and the first call raises the error.
    with contextlib.suppress(MachineCodeError, ArgumentValueError):
        kernels = engines.kernels("arrays of JAX")
        if kernels.xla.is_built():
            register()
            kernels.xla.register_built()


_register_built_kernels()
