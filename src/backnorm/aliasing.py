"""Rules of `out`: the arrays that it may be, and the operands that it may overlap in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from backnorm.addresses import address_of
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import Problem, check_like


def check_out(problem: Problem, operands: Sequence[np.ndarray | None], out: np.ndarray) -> bool:
    """Check `out`, the array for dx or y. Return whether `out` is row-major, aligned and of native
    byte order.

    Parameters
    ----------
    problem : Problem
        Its signature names the operand that `out` may overwrite. `out` must not overlap any other
        operand.
    operands : sequence of numpy.ndarray or None
        The operands of the signature.
    out : numpy.ndarray
        Not an instance of a subclass: see `own`.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
    """
    usual = out.flags.carray and out.shape == problem.shape and out.dtype is problem.dtype
    if not usual:
        check_like("out", out, problem.shape, problem.dtype)
        check_writable("out", out)
    signature = problem.signature
    may_overlap = np.may_share_memory
    for name, array in zip(signature.names, operands, strict=True):
        if array is not None and may_overlap(out, array):
            check_apart(out, name, array, signature.overwrites)
    return usual


def check_apart(out: np.ndarray, name: str, array: np.ndarray, overwrites: str | None) -> None:
    """Raise if `out` overlaps an operand.

    There is one exception: `out` may be exactly the memory of the operand whose name is
    `overwrites`.
    """
    in_place = name == overwrites
    if (in_place and array is out) or not _overlap(out, array):
        return
    separate = "separate memory"
    if overwrites is not None:
        separate += f", or exactly the memory of {{{overwrites}}}"
    if not in_place:
        raise ArgumentValueError("out", f"overlaps {{{name}}} in memory", accepted=separate)
    if not _same_memory(out, array):
        raise ArgumentValueError("out", f"overlaps part of {{{name}}} in memory", accepted=separate)


def own(out: Any) -> np.ndarray:
    """Return an output array as a plain NumPy array on the same memory.

    The array itself, if it is of a subclass of `ndarray`, could report an address or strides that
    are not those of its memory.

    Raises
    ------
    ArgumentTypeError
        If `out` is not an array, or is a masked array.
    """
    kind = type(out)
    if kind is np.ndarray:
        plain: np.ndarray = out
        return plain
    # The code tests `type(out)` instead of calling `isinstance`. `isinstance` would also read the
    # attribute `out.__class__`, which an object can override.
    if not issubclass(kind, np.ndarray) or issubclass(kind, np.ma.MaskedArray):
        raise ArgumentTypeError(
            "out", "must be an array", came=kind.__name__, accepted="a NumPy array or None"
        )
    return np.ndarray.view(out, np.ndarray)


def check_writable(name: str, array: np.ndarray) -> None:
    """Raise unless a plain array is writeable and no two of its elements share memory."""
    if not array.flags.writeable:
        raise ArgumentValueError(name, "is read-only", accepted="a writable array")
    if not array.flags.c_contiguous and _overlaps_itself(array):
        raise ArgumentValueError(
            name,
            "has elements that share memory",
            came=f"strides {array.strides}",
            accepted="an array with distinct elements",
        )


def _same_memory(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        address_of(left) == address_of(right)
        and left.strides == right.strides
        and left.dtype == right.dtype
    )


def _overlaps_itself(array: np.ndarray) -> bool:
    """Whether elements of the array share memory.

    The result is also True if finding out exactly would take too long.
    """
    strides = sorted(
        (abs(stride), size)
        for stride, size in zip(array.strides, array.shape, strict=True)
        if size > 1
    )
    # The axes are sorted by stride. No elements overlap if the stride of each axis is at least
    # `reach`, the number of bytes that the elements along all earlier axes span together. This is
    # the usual case.
    reach = array.itemsize
    for stride, size in strides:
        if stride < reach:
            break
        reach += stride * (size - 1)
    else:
        return False
    # Whether two elements overlap depends only on the differences of their indices. So if any
    # elements overlap, there are two overlapping elements with indices of the following form. Let k
    # be the first axis on which the two indices differ. On the axes before k, both indices are 0.
    # On axis k, one index is 0, and the other is larger.
    rows = [array[(0,) * axis] for axis in range(array.ndim)] if array.size else []
    return any(_overlap(each[:1], each[1:]) for each in rows)


def _overlap(left: np.ndarray, right: np.ndarray) -> bool:
    try:
        # `max_work` limits the time, because the exact answer can take exponential time. NumPy's
        # type stubs reject this argument, although it is valid.
        return np.shares_memory(left, right, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
