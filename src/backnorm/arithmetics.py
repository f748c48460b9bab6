"""In what a call computes: what it asks for, what this block asks for, what its elements have.

The arithmetic of a call is the type in which its elements are computed and short runs of its sums
are added up; longer ones are float64 in any.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal, cast, get_args

import numpy as np

from backnorm import config
from backnorm.dtypes import FLOAT64, is_16_bit
from backnorm.errors import ArgumentValueError, shown
from backnorm.scalars import check_word

__all__ = [
    "Arithmetic",
    "arithmetic",
    "asked",
    "check_arithmetic",
    "chosen",
    "own_arithmetic",
    "resolved",
]

Arithmetic = Literal["float32", "float64"]

_ACCEPTED = "'float32' or 'float64'"

_chosen: ContextVar[Arithmetic | None] = ContextVar("backnorm_arithmetic", default=None)

#: Return what the block that is being run asks for, None outside of all: part of every call's key.
chosen = _chosen.get


@contextlib.contextmanager
def arithmetic(name: Arithmetic) -> Iterator[None]:
    """Let calls in a ``with`` block compute in this type, those of other threads not.

    Parameters
    ----------
    name : {"float32", "float64"}
        float64: every element is the exact value rounded once, but for 2**-40 of the magnitude of
        its terms. float32: faster, and off by up to 2**-20 of that magnitude beside the rounding,
        on average by 2**-25 (``backnorm.conformance.judge.budget`` has both). It holds for calls
        without an ``arithmetic`` of their own. Elements that are float64 themselves are computed
        in float64 in any case.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it is neither.

    Notes
    -----
    An inner block has precedence over an outer one. Outside of all, it is what the environment
    variable BACKNORM_ARITHMETIC says when it is first needed; without that, float32 for elements of
    16 bits and float64 for others. It is also a decorator: of functions, not of coroutines.

    Examples
    --------
    >>> import backnorm
    >>> import numpy as np
    >>> x = np.ones((2, 3, 4), np.float16)
    >>> with backnorm.arithmetic("float32"):
    ...     print(backnorm.explain(x, x, x[0, :, 0], x[0, :, 0], epsilon=1e-5).problem.arithmetic)
    float32
    """
    token = _chosen.set(check_arithmetic(name))
    try:
        yield
    finally:
        _chosen.reset(token)


def resolved(dtype: np.dtype, arithmetic: object = None) -> Arithmetic:
    """Return the arithmetic of a call on elements of a type, which asks for one, or (None) not.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If it asks for something else than the two, or for float32 beside float64 elements.
    """
    return asked(dtype, arithmetic) or own_arithmetic(dtype)


def asked(dtype: np.dtype, arithmetic: object = None) -> Arithmetic | None:
    """Return what a call itself, its block or the environment asks for, or None if none does.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        As `resolved`.
    """
    if arithmetic is None:
        return None if dtype == FLOAT64 else chosen() or _initial()
    name = check_arithmetic(arithmetic)
    if name == "float32" and dtype == FLOAT64:
        raise ArgumentValueError(
            "arithmetic",
            "float64 elements are computed in float64",
            came="'float32'",
            accepted="'float64' or None",
            hint="convert the elements to float32 first",
        )
    return name


def own_arithmetic(dtype: np.dtype) -> Arithmetic:
    """Return what elements of a type are computed in if nothing else is asked for."""
    return "float32" if is_16_bit(dtype) else "float64"


def check_arithmetic(name: object, argument: str = "arithmetic") -> Arithmetic:
    """Return `name` if it is one of the two, or raise."""
    word = check_word(argument, name, accepted=_ACCEPTED)
    if word not in get_args(Arithmetic):
        raise ArgumentValueError(argument, "unknown", came=shown(word), accepted=_ACCEPTED)
    return cast("Arithmetic", word)


@functools.cache
def _initial() -> Arithmetic | None:
    """Return what the environment asked for when it was first needed."""
    return config.arithmetic()
