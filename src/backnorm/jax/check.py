"""What may be asked of the JAX functions, by the rules of `backnorm.problem`."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable
from numbers import Real
from typing import Any

import jax
import numpy as np

from backnorm import problem
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import Metadata

__all__ = [
    "check_array",
    "check_axis",
    "check_axis_name",
    "check_backward",
    "check_epsilon",
    "check_forward",
    "check_inference",
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


def check_forward(x: Any, gamma: Any, beta: Any, *, epsilon: float, axis: int) -> np.dtype:
    """Check a training forward and return the type of its statistics."""
    return problem.forward_problem(
        _canonical(x, axis), _read(gamma), _read(beta), epsilon=epsilon, data_format="NCX"
    ).statistics_dtype


def check_inference(
    x: Any, mean: Any, variance: Any, gamma: Any, beta: Any, *, epsilon: float, axis: int
) -> None:
    """Check a normalisation with given statistics."""
    problem.inference_problem(
        _canonical(x, axis),
        _read(mean),
        _read(variance),
        _read(gamma),
        _read(beta),
        epsilon=epsilon,
        data_format="NCX",
    )


def check_backward(
    x: Any, dy: Any, mean: Any, variance: Any, gamma: Any, *, epsilon: float, axis: int
) -> np.dtype:
    """Check a backward pass and return the type of its parameter gradients."""
    if dy.shape != x.shape:
        raise ArgumentValueError(
            "dy", "must have the shape of x", came=f"shape {dy.shape}", accepted=f"shape {x.shape}"
        )
    return problem.backward_problem(
        _canonical(x, axis),
        _canonical(dy, axis),
        _read(mean),
        _read(variance),
        _read(gamma),
        epsilon=epsilon,
        data_format="NCX",
        training=True,
    ).statistics_dtype


def _read(array: Any) -> Any:
    """Return what the rules look at, or None for None."""
    if array is None:
        return None
    dtype = array.dtype
    # Random keys and the like: an element type of JAX that NumPy does not have.
    return Metadata(array.shape, dtype if isinstance(dtype, np.dtype) else np.dtype(object))


def _canonical(array: Any, axis: int) -> Any:
    """Return the same for x or dy as (outer, channels, inner), for any channel axis."""
    shape, (_, dtype) = array.shape, _read(array)
    outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    return Metadata((outer, shape[axis], inner), dtype)
