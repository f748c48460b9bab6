"""Checks of the arguments of the JAX functions, by the rules of `backnorm.problem`."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

import jax
import numpy as np

from backnorm import problem
from backnorm.dtypes import element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError, described, shown
from backnorm.scalars import as_array, check_integer

Groups = tuple[tuple[int, ...], ...]

_OPTIONAL = ("gamma", "beta", "residual")


def read(name: str, value: Any) -> Any:
    """Return `value` if it is an array of JAX or NumPy, or None for an absent gamma, beta or
    residual; raise otherwise.

    A subclass of NumPy's array becomes a plain array, because JAX would call the subclass's
    methods.
    """
    if value is None and name in _OPTIONAL:
        return None
    kind = type(value)
    if issubclass(kind, np.ndarray) and not issubclass(kind, np.ma.MaskedArray):
        value = as_array(name, value)
        # The type is checked here, because JAX's error for an unknown type does not name the
        # argument.
        native = element_type(value.dtype)
        if native is None:
            raise problem.unsupported_type(name, value.dtype)
        # JAX ignores the byte order of an array. So an array whose byte order is not the
        # processor's is converted.
        return value if value.dtype.isnative else value.astype(native)
    if _is_of_jax(value):
        return value
    raise ArgumentTypeError(
        name,
        "must be an array",
        came=kind.__name__,
        accepted="a jax.Array or a numpy.ndarray",
        hint=None if value is None else f"convert it first: jax.numpy.asarray({name})",
    )


def read_mask(mask: Any, x: Any) -> Any:
    """Return the mask, or None if there is none; raise if the mask is invalid.

    A mask must be an array of bool whose shape broadcasts to the shape of x.
    """
    if mask is None:
        return None
    accepted = f"an array of bool whose shape broadcasts to x's, {x.shape}"
    if not (_is_of_jax(mask) or (issubclass(type(mask), np.ndarray) and mask.dtype.isnative)):
        came = type(mask).__name__
        raise ArgumentTypeError("mask", "must be an array", came=came, accepted=accepted)
    if not jax.numpy.issubdtype(mask.dtype, jax.numpy.bool_):
        raise ArgumentTypeError(
            "mask", "must be of bool", came=str(mask.dtype), accepted=accepted,
            hint="convert it first: mask.astype(bool)",
        )  # fmt: skip
    try:
        fits = np.broadcast_shapes(mask.shape, x.shape) == tuple(x.shape)
    except ValueError:
        fits = False
    if not fits:
        raise ArgumentValueError(
            "mask", "does not broadcast to x", came=tuple(mask.shape), accepted=accepted
        )
    return mask


def _is_of_jax(value: object) -> bool:
    # `isinstance` is not used, because it trusts the `__class__` of an object, which the object can
    # override.
    return issubclass(type(value), jax.Array | jax.core.Tracer)


def check_epsilon(epsilon: Any) -> float:
    """Return epsilon as a float, or raise if it is not known while tracing."""
    if _is_of_jax(epsilon):
        raise ArgumentTypeError(
            "epsilon",
            "must be a real number, known when the function is traced",
            came=f"a value of type {type(epsilon).__name__}",
            accepted="a finite float >= 0",
            hint="pass a Python float, and name it in static_argnames of jax.jit",
        )
    return problem.check_epsilon(epsilon)


def check_axis_name(axis_name: Any) -> tuple[Hashable, ...]:
    """Return the names of the mapped axes to reduce over."""
    if axis_name is None:
        return ()
    names = tuple(axis_name) if type(axis_name) in (tuple, list) else (axis_name,)
    for name in names:
        # JAX interprets an integer as the position of an axis of an array.
        if type(name) is not str and issubclass(type(name), int | Iterable):
            raise ArgumentTypeError(
                "axis_name",
                "must be the name of a mapped axis, or a tuple of names",
                came=described(name),
                accepted="a string, a tuple of strings, or None",
            )
        # A name is looked up before a compiled function is called. Otherwise, JAX would store the
        # wrong name before it raises an error, and would compare it with the names of later calls.
        try:
            jax.lax.psum(1, name)
        except Exception as error:
            raise ArgumentValueError(
                "axis_name",
                "is not the name of a mapped axis here",
                came=", ".join(map(shown, names)),
                accepted="an axis of the enclosing shard_map, pmap or vmap",
            ) from error
    return names


def check_axis_index_groups(groups: Any, names: tuple[Hashable, ...]) -> Groups | None:
    """Return `axis_index_groups` as tuples of indices on the mapped axes.

    If the argument is None, return None. If it is invalid, raise an error.
    """
    if groups is None:
        return None
    accepted = "a list of lists of integers with an axis_name, or None"
    if not names:
        raise ArgumentValueError(
            "axis_index_groups", "needs an axis_name", came=shown(groups), accepted=accepted
        )
    if type(groups) not in (tuple, list) or any(type(g) not in (tuple, list) for g in groups):
        raise ArgumentTypeError(
            "axis_index_groups", "must be groups of indices on the mapped axes",
            came=described(groups), accepted=accepted,
        )  # fmt: skip
    what = "must have integers, indices on the mapped axes"
    return tuple(
        tuple(
            check_integer("axis_index_groups", each, problem=what, accepted=accepted)
            for each in group
        )
        for group in groups
    )


def not_reproducible(came: str) -> ArgumentValueError:
    """Return the error for reproducible sums that `jax.numpy` would compute."""
    return ArgumentValueError(
        "reproducible",
        "must be False if jax.numpy computes sums instead of a kernel",
        came=f"True {came}",
        accepted="False, or True on one CPU device for a known shape, without axis_name and mask",
    )
