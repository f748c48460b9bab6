"""Rules of `out`: what may be written to, and what it may share memory with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.problem import Problem, Words

__all__ = ["check_out"]


def check_out(
    problem: Problem,
    out: np.ndarray,
    inputs: Mapping[str, np.ndarray | None],
    dy: np.ndarray | None,
    words: Words,
) -> None:
    """Check the array that a caller wants dx or y written to.

    Parameters
    ----------
    problem : Problem
    out : numpy.ndarray
    inputs : mapping of str to numpy.ndarray or None
        All other arrays of the call by their canonical names; none may overlap `out`.
    dy : numpy.ndarray or None
        May be exactly `out` (in place), but not overlap it otherwise.
    words : mapping of str to str
        The caller's names for the canonical ones.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
    """
    # What is usual, in one look.
    usual = (
        type(out) is np.ndarray
        and out.flags.carray
        and out.shape == problem.shape
        and out.dtype is problem.dtype
    )
    if not usual:
        _check_kind(problem, out, words)
    name = words.get("out", "out")
    near = np.may_share_memory
    for other, array in inputs.items():
        if array is not None and near(out, array) and _overlap(out, array):
            raise ArgumentValueError(
                name,
                f"overlaps {words.get(other, other)} in memory",
                accepted="separate memory, or exactly the memory of " + words.get("dy", "dy"),
            )
    if dy is None or dy is out or not near(out, dy):
        return
    if _overlap(out, dy) and not _same_memory(out, dy):
        raise ArgumentValueError(
            name,
            f"overlaps part of {words.get('dy', 'dy')} in memory",
            accepted=f"separate memory, or exactly the memory of {words.get('dy', 'dy')}",
        )


def _check_kind(problem: Problem, out: object, words: Words) -> None:
    """Check type, shape, element type and flags of `out`."""
    name = words.get("out", "out")
    if not isinstance(out, np.ndarray):
        raise ArgumentTypeError(
            name, "must be an array", came=type(out).__name__, accepted="a NumPy array or None"
        )
    if out.shape != problem.shape:
        raise ArgumentValueError(
            name,
            f"must have the shape of {words.get('x', 'x')}",
            came=f"shape {out.shape}",
            accepted=f"shape {problem.shape}",
        )
    if out.dtype.newbyteorder("=") != problem.dtype:
        raise ArgumentTypeError(
            name,
            f"must have the element type of {words.get('x', 'x')}",
            came=out.dtype,
            accepted=problem.dtype,
        )
    if not out.flags.writeable:
        raise ArgumentValueError(name, "is read-only", accepted="a writable array")
    if not out.flags.c_contiguous and any(
        stride == 0 and size > 1 for stride, size in zip(out.strides, out.shape, strict=True)
    ):
        raise ArgumentValueError(
            name,
            "has elements that share memory",
            came=f"strides {out.strides}",
            accepted="an array with distinct elements",
        )


def _same_memory(left: np.ndarray, right: np.ndarray) -> bool:
    return (
        left.__array_interface__["data"][0] == right.__array_interface__["data"][0]
        and left.strides == right.strides
        and left.dtype == right.dtype
    )


def _overlap(left: np.ndarray, right: np.ndarray) -> bool:
    try:
        # The exact answer can take exponential time; the stubs know no bound but the two names.
        return np.shares_memory(left, right, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
