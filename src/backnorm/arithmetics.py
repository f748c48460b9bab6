"""The arithmetic of a call: set by its argument, a `with` block, the environment or the dtype.

The arithmetic is the type in which elements are computed and short runs of sums are added up.
Longer runs are added up in float64, whichever arithmetic is chosen.
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

Arithmetic = Literal["float32", "float64"]

_ACCEPTED = "'float32' or 'float64'"

_chosen: ContextVar[Arithmetic | None] = ContextVar("backnorm_arithmetic", default=None)

#: chosen(): the arithmetic that the surrounding ``with arithmetic(...)`` block sets, or None if
#: there is no such block. This arithmetic is part of the cache key of every call.
chosen = _chosen.get


@contextlib.contextmanager
def arithmetic(name: Arithmetic) -> Iterator[None]:
    """Set the type in which calls in a ``with`` block compute; other threads are not affected.

    Parameters
    ----------
    name : {"float32", "float64"}
        float64: every element is the exact value rounded once, with an additional error of at most
        2**-40 of the magnitude of its terms. float32: faster, with an additional error of at most
        2**-20 of that magnitude, on average 2**-25. ``backnorm.conformance.judge.budget`` states
        the bounds. The block has no effect on calls with an ``arithmetic`` argument, or on float64
        elements, which are always computed in float64.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If `name` is neither.

    Notes
    -----
    An inner block has precedence over an outer one. Outside of blocks, the environment variable
    BACKNORM_ARITHMETIC sets the type; the variable is read when first needed. If it is not set,
    elements of 16 bits are computed in float32 and others in float64. `arithmetic` is also a
    decorator of functions, but not of coroutines.

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
    """Return the arithmetic of a call on elements of type `dtype`.

    `arithmetic` is the value that the call passes for its argument `arithmetic`, or None.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If the argument is not "float32", "float64" or None, or is "float32" for float64 elements.
    """
    return requested(dtype, arithmetic) or own_arithmetic(dtype)


def requested(dtype: np.dtype, arithmetic: object = None) -> Arithmetic | None:
    """Return the arithmetic that a call on elements of type `dtype` asks for, or None.

    If the argument `arithmetic` is not None, it is returned. Otherwise, for float64 elements, None
    is returned. For other elements, the arithmetic of the surrounding block ``with
    backnorm.arithmetic(...)`` is returned. If there is no such block, the value of the variable
    BACKNORM_ARITHMETIC is returned. If none of these names an arithmetic, the result is None: the
    call uses the default of the type.

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
    """Return the default arithmetic of an element type."""
    return "float32" if is_16_bit(dtype) else "float64"


def check_arithmetic(name: object) -> Arithmetic:
    """Return `name` if it is an arithmetic, or raise."""
    word = check_word("arithmetic", name, accepted=_ACCEPTED)
    if word not in get_args(Arithmetic):
        raise ArgumentValueError("arithmetic", "unknown", came=shown(word), accepted=_ACCEPTED)
    return cast("Arithmetic", word)


@functools.cache
def _initial() -> Arithmetic | None:
    """Return the value of BACKNORM_ARITHMETIC, which is read only once: when it is first needed."""
    return config.arithmetic()
