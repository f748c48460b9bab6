"""Kernels as custom calls of XLA: registration, and what is written into a call.

The handler that answers the calls is `backnorm.cpu.kernels.xla_handler`, machine code that is
loaded with `backnorm.jax`: a compiled function that another process exported finds it, and all
kernels.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from backnorm.cpu import library, xla
from backnorm.cpu.kinds import XLA
from backnorm.cpu.record import SLOTS
from backnorm.cpu.xla_structures import ELEMENTS
from backnorm.errors import ArgumentValueError, MachineCodeError
from backnorm.executable import executable
from backnorm.jax.fallback import warn_of_formulas
from backnorm.layout import mask_size
from backnorm.problem import Problem
from backnorm.signature import SIGNATURES

__all__ = ["TARGET", "call", "is_usable", "reason_against", "register"]

#: The name of the handler, in the text of compiled functions too.
TARGET = "backnorm_kernel"

# Of these phases sums are told to other devices in between, which is planned in another way.
_PHASES = ("reduce", "apply")

_HEADER = Path("xla") / "ffi" / "api" / "c_api.h"

_lock = threading.Lock()
_registered: list[Any] = []


class Version(NamedTuple):
    """A version of XLA's foreign function interface."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


# The versions in which structures are as `xla_structures` has them: those of jaxlib 0.5 to 0.11.
_OLDEST, _NEWEST = Version(0, 1), Version(0, 4)


@functools.cache
def version() -> Version | None:
    """Return the version of the interface that this jaxlib has, None if it does not say.

    Only jaxlib's header has it. A handler of a version that XLA does not know would keep JAX from
    making its devices.
    """
    try:
        lines = (Path(jax.ffi.include_dir()) / _HEADER).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    definitions = (words for words in map(str.split, lines) if words[:1] == ["#define"])
    defined = {words[1]: words[2] for words in definitions if len(words) == 3}
    numbers = [defined.get(f"XLA_FFI_API_{part}", "") for part in ("MAJOR", "MINOR")]
    return Version(*map(int, numbers)) if all(map(str.isdecimal, numbers)) else None


def reason_against() -> str | None:
    """Return why kernels cannot be called by XLA here, or None if they can."""
    found = version()
    if found is not None and _OLDEST <= found <= _NEWEST:
        return None
    came = "none" if found is None else str(found)
    return (
        f"the foreign function interface of this jaxlib has version {came}, "
        f"known are {_OLDEST} to {_NEWEST}"
    )


def is_usable() -> bool:
    """Whether kernels can be called by XLA here; warn once if not."""
    reason = reason_against()
    if reason is not None:
        warn_of_formulas("call its kernels on CPUs", reason)
    return reason is None


def call(
    problem: Problem,
    operands: Mapping[str, jax.Array],
    results: Sequence[jax.Array],
    *,
    instances: int | None,
    spread: Sequence[bool],
    count: int,
) -> Sequence[jax.Array]:
    """Return the results of a problem, or of several instances of it.

    Parameters
    ----------
    problem : Problem
        Of one instance.
    operands : mapping of str to array
        By their names in the signature, which says where a kernel finds their addresses.
    results : sequence of arrays
        For every result that a kernel writes, an array, or another value, of its shape and type.
    instances : int or None
        How many instances there are.
    spread : sequence of bool
        Which operands have a leading axis of instances; results have one if there are any.
    count : int
        Elements of a channel that sums are over: those of the problem, or more.
    """
    register()
    stage = _stage(problem)
    name = xla.introduce(stage.kind)
    signature = SIGNATURES[problem.operation]
    fields = {operand.name: operand.field for operand in signature.operands}
    fields |= {number.name: number.field for number in signature.numbers}
    described = [
        _described(operand, fields[name], instances if each else None)
        for (name, operand), each in zip(operands.items(), spread, strict=True)
    ]
    written = [r.field for r in signature.results if r.field and r.option is None]
    described += [
        _described(result, field, instances) for result, field in zip(results, written, strict=True)
    ]
    kinds = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    if problem.writes_mask:
        # Nobody asks for it: what is positive in y says the same.
        mask = jax.ShapeDtypeStruct(((instances or 1) * mask_size(problem.size),), np.uint8)
        kinds.append(mask)
        described.append(_described(mask, "mask", instances))
    record = stage.template.copy()
    record[SLOTS["count"]] = count
    found: Sequence[jax.Array] = jax.ffi.ffi_call(TARGET, kinds)(
        *operands.values(),
        buffers=np.concatenate(described),
        call=np.array([name, instances or 1, stage.participants - 1], np.int64),
        record=record,
    )
    return found[: len(results)]


def _described(array: jax.Array, field: str, instances: int | None) -> np.ndarray:
    """Return what the attribute "buffers" says of an array: see `xla_frame`."""
    dtype = np.dtype(array.dtype)
    size = array.size * dtype.itemsize
    stride = size // instances if instances else 0
    return np.array(
        [SLOTS[field], ELEMENTS[dtype.name], array.ndim, array.size, size, stride], np.int64
    )


def _stage(problem: Problem) -> Any:
    """Return the kernel of a problem on arrays in row-major order, as XLA gives them."""
    return executable(problem, exchanged=problem.operation.startswith(_PHASES)).stage


def register() -> None:
    """Register the handler, once for the process, and keep it: XLA never forgets its address."""
    if _registered:
        return
    found = version()
    assert found is not None
    # Before the lock is taken: it may have to be built.
    answer = xla.handler(*found)
    with _lock:
        if not _registered:
            jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(answer), platform="cpu")
            _registered.append(answer)


def _register_what_is_built() -> None:
    """Register the handler and all kernels, for compiled functions that come from elsewhere."""
    if reason_against() is not None:
        return
    # An import compiles nothing. Where there is no machine code, or none of the level that is asked
    # for, the error belongs to the first call.
    with contextlib.suppress(MachineCodeError, ArgumentValueError):
        if library.path_of(XLA) is not None:
            register()
            xla.introduce_built()


_register_what_is_built()
