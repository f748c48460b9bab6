"""Arguments that are numbers, flags or words, read in one way by all front doors.

What a value is its type says, and never the value: an object can say that it is of any class, and
its methods can raise anything. What is returned is Python's own, whatever came.
"""

from __future__ import annotations

import math
import operator
from numbers import Real
from typing import Any

import numpy as np

from backnorm.errors import ArgumentTypeError, described

__all__ = ["check_flag", "check_integer", "check_number", "check_word"]

_FLAGS = (bool, np.bool_)


def check_flag(name: str, value: object) -> bool:
    """Return `value` as a bool, or raise if it is not one."""
    if type(value) in _FLAGS:
        return bool(value)
    raise ArgumentTypeError(
        name, "must be a boolean", came=described(value), accepted="True or False"
    )


def check_number(
    name: str, value: Any, *, accepted: str, problem: str = "must be a real number"
) -> float:
    """Return `value` as a float, infinity for one that is too large; or raise if it is no number.

    A boolean is none, nor is an array.
    """
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
    """Return `value` as an int, or raise if it is not one. A boolean is none."""
    if type(value) is int:
        return value
    if type(value) in _FLAGS:
        raise _no_value(name, problem, value, accepted)
    try:
        return operator.index(value)
    except Exception as error:
        raise _no_value(name, problem, value, accepted) from error


def check_word(name: str, value: object, *, accepted: str) -> str:
    """Return `value` as a plain string, or raise if it is none."""
    if issubclass(type(value), str):
        # A subclass can compare as it likes.
        return str.__str__(value)
    raise _no_value(name, "must be a string", value, accepted)


def _no_value(name: str, problem: str, value: object, accepted: str) -> ArgumentTypeError:
    return ArgumentTypeError(name, problem, came=described(value), accepted=accepted)
