"""What may be asked of the JAX functions, by the rules of `backnorm.problem`."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from numbers import Real
from typing import Any

import jax
import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import Metadata, problem_of
from backnorm.signature import SIGNATURES, Operation

__all__ = [
    "check_array",
    "check_axis",
    "check_axis_name",
    "check_epsilon",
    "check_operands",
]


def check_array(name: str, value: Any) -> None:
    """Raise if `value` is not an array of JAX or NumPy."""
    if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, np.ma.MaskedArray):
        return
    raise ArgumentTypeError(
        name,
        "must be an array",
        came=type(value).__name__,
        accepted="a jax.Array or a numpy.ndarray",
        hint=None if value is None else f"convert it first: jax.numpy.asarray({name})",
    )


def check_epsilon(epsilon: Any) -> float:
    """Return epsilon as a float, or raise if it is not known while tracing."""
    if isinstance(epsilon, bool | np.bool_) or not isinstance(epsilon, Real | np.floating):
        traced = isinstance(epsilon, jax.Array)
        raise ArgumentTypeError(
            "epsilon",
            "must be a real number, known when the function is traced",
            came=f"a value of type {type(epsilon).__name__}",
            accepted="a finite float >= 0",
            hint="pass a Python float, by static_argnames through jax.jit" if traced else None,
        )
    return float(epsilon)


def check_axis(axis: Any, x: Any) -> int:
    """Return the channel axis, not negative, or raise."""
    accepted = f"an integer from {-x.ndim} to {x.ndim - 1}" if x.ndim else "x of rank 1 or more"
    try:
        if isinstance(axis, bool | np.bool_):
            raise TypeError
        place = operator.index(axis)
    except TypeError:
        raise ArgumentTypeError(
            "axis",
            "must be an integer, the position of the channels",
            came=f"{axis!r} of type {type(axis).__name__}",
            accepted=accepted,
        ) from None
    if not -x.ndim <= place < x.ndim:
        raise ArgumentValueError(
            "axis", f"is not an axis of x, which has rank {x.ndim}", came=place, accepted=accepted
        )
    return place % int(x.ndim)


def check_axis_name(axis_name: Any) -> tuple[Hashable, ...]:
    """Return the names of the mapped axes to reduce over."""
    if axis_name is None:
        return ()
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    for name in names:
        if not isinstance(name, Hashable):
            raise ArgumentTypeError(
                "axis_name",
                "must be the name of a mapped axis, or several",
                came=f"{name!r} of type {type(name).__name__}",
                accepted="a string, a tuple of strings, or None",
            )
    return names


def check_operands(operation: Operation, setting: Any, **given: Any) -> np.dtype:
    """Check the operands of an operation, by their names; return the type of per-channel results.

    `setting` has epsilon and the channel axis, not negative.
    """
    operands = [_read(each) for each in SIGNATURES[operation].arranged(given)]
    options = {"epsilon": setting.epsilon, "data_format": (setting.axis,)}
    return problem_of(operation, *operands, **options).statistics_dtype


def _read(array: Any) -> Metadata | None:
    """Return what the rules look at, or None for None."""
    if array is None:
        return None
    dtype = array.dtype
    # Random keys and the like: an element type of JAX that NumPy does not have.
    return Metadata(array.shape, dtype if isinstance(dtype, np.dtype) else np.dtype(object))
