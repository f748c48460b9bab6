"""Read arguments that are numbers, flags, words or arrays, for all public functions.

The checks use ``type(value)``, because an object can override `__class__`, and any method of an
object can raise an error. Numbers, flags and words are returned as Python's own types.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError, described, shown

_FLAGS = (bool, np.bool_)


def as_array(name: str, value: object, field: str = "") -> np.ndarray:
    """Return `value` as a plain array without copying, or raise if it cannot be one.

    A masked array raises an error, because its mask would be lost. If the value is a part of the
    argument `name`, `field` says which part, as in "its mean: ". The error message then begins with
    `field`.
    """
    if type(value) is np.ndarray:
        return value
    if value is None:
        raise missing(name)
    problem = "masked arrays are not supported: the mask would be lost"
    hint: str | None = "fill it first, e.g. with .filled(0)"
    cause = None
    if not issubclass(type(value), np.ma.MaskedArray):
        try:
            return np.asarray(value)
        except MemoryError:
            raise
        except Exception as error:
            problem, hint, cause = f"cannot be read as an array ({shown(error, str)})", None, error
    raise ArgumentTypeError(
        name, field + problem, came=type(value).__name__, accepted="an array", hint=hint
    ) from cause


def missing(name: str) -> ArgumentTypeError:
    """Return the error for a required array that is None."""
    return ArgumentTypeError(name, "is required", came="None", accepted="an array")


def check_flag(name: str, value: object) -> bool:
    """Return `value` as a bool, or raise if it is not one."""
    if type(value) in _FLAGS:
        return bool(value)
    raise ArgumentTypeError(
        name, "must be a boolean", came=described(value), accepted="True or False"
    )


def check_number(name: str, value: Any, *, accepted: str) -> float:
    """Return `value` as a float; raise if it is not a number.

    A number beyond the range of float64 becomes infinite. Booleans and arrays are not accepted as
    numbers.
    """
    problem = "must be a real number"
    if type(value) is float:
        return value
    if issubclass(type(value), Real) and type(value) not in _FLAGS:
        try:
            try:
                return float(value)
            except OverflowError:
                return -math.inf if value < 0 else math.inf
        except Exception as error:
            raise _no_value(name, problem, value, accepted) from error
    raise _no_value(name, problem, value, accepted)


def check_integer(
    name: str, value: Any, *, accepted: str, problem: str = "must be an integer"
) -> int:
    """Return `value` as an int, or raise if it is not an integer. A boolean is not accepted."""
    if type(value) is int:
        return value
    if type(value) in _FLAGS:
        raise _no_value(name, problem, value, accepted)
    try:
        return operator.index(value)
    except Exception as error:
        raise _no_value(name, problem, value, accepted) from error


def check_axis(axis: object, rank: int) -> int:
    """Return the channel axis of an x of this rank as a number from 0 to rank - 1, or raise."""
    accepted = f"an integer from {-rank} to {rank - 1}" if rank else "x of rank 1 or more"
    what = "must be an integer, the position of the channels"
    place = check_integer("axis", axis, problem=what, accepted=accepted)
    if not -rank <= place < rank:
        raise ArgumentValueError(
            "axis", f"is not an axis of x, which has rank {rank}", came=place, accepted=accepted
        )
    return place % rank


def check_word(name: str, value: object, *, accepted: str) -> str:
    """Return `value` as a plain string, or raise if it is not a string."""
    if issubclass(type(value), str):
        # A subclass of str could override comparisons, so a plain str is returned.
        return str.__str__(value)
    raise _no_value(name, "must be a string", value, accepted)


def _no_value(name: str, problem: str, value: object, accepted: str) -> ArgumentTypeError:
    return ArgumentTypeError(name, problem, came=described(value), accepted=accepted)
