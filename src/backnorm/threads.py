"""How many threads a call may have: what was set, what this block allows, what PyTorch has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from sys import modules
from time import monotonic

from backnorm import config, machine
from backnorm.errors import ArgumentValueError
from backnorm.scalars import check_integer

__all__ = ["get_num_threads", "limit", "num_threads", "set_limit", "set_num_threads"]

#: What was set for the process; None: as many as there are processors.
_most: int | None = None

#: What the block that is being run allows.
_allowed: ContextVar[int | None] = ContextVar("backnorm_num_threads", default=None)

# What is allowed if nothing was set, beside PyTorch and without it, and until when that holds: the
# processors that the process may use can change.
_beside, _alone, _until = 1, 1, 0.0


def set_num_threads(n: int) -> None:
    """Set how many threads a call of backnorm may have at most, in the whole process.

    Parameters
    ----------
    n : int
        1 or more. More than the processors this process may use is capped to those.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If n is not an integer of 1 or more.

    Notes
    -----
    Results do not depend on it: they are the same bits for any number of threads. In a process
    that has imported PyTorch a call never has more threads than ``torch.get_num_threads()`` says.
    """
    global _most
    _most = min(_checked(n), machine.processors())


@contextlib.contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Let calls in a ``with`` block have at most so many threads, those of other threads not.

    Parameters
    ----------
    n : int
        1 or more; it never raises what `set_num_threads` or an outer block allows.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If n is not an integer of 1 or more.

    Examples
    --------
    >>> import backnorm
    >>> with backnorm.num_threads(1):
    ...     backnorm.get_num_threads()
    1
    """
    outer = _allowed.get()
    inner = _checked(n)
    token = _allowed.set(inner if outer is None else min(inner, outer))
    try:
        yield
    finally:
        _allowed.reset(token)


def get_num_threads() -> int:
    """Return how many threads a call of backnorm may have here and now.

    The least of: what `set_num_threads` has set, or else BACKNORM_NUM_THREADS; what the
    `num_threads` block allows; the processors that this process may use; and, where PyTorch is
    imported, ``torch.get_num_threads()``, elsewhere OMP_NUM_THREADS.
    """
    torch = modules.get("torch")
    most = _most
    # What `limit` does, without another call: this is part of every call of an operator.
    if most is None:
        if monotonic() >= _until:
            _look_again()
        most = _alone if torch is None else _beside
    allowed = _allowed.get()
    if allowed is not None and allowed < most:
        most = allowed
    if torch is None or most == 1:
        return most
    try:
        number: int = torch.get_num_threads()
    except AttributeError:  # it is being imported
        return most
    return number if number < most else most


def limit() -> int:
    """Return what is allowed in the whole process."""
    if _most is not None:
        return _most
    if monotonic() >= _until:
        _look_again()
    return _beside if "torch" in modules else _alone


def set_limit(n: int) -> None:
    """Set that, or take back what was set if so many would be allowed anyway."""
    global _most
    _most = None
    if n < limit():
        set_num_threads(n)


def _look_again() -> None:
    global _beside, _alone, _until
    available, ours = machine.processors(), config.initial_threads()
    _beside = min(ours or available, available)
    _alone = min(ours or config.openmp_threads() or available, available)
    _until = monotonic() + 1


def _checked(n: int) -> int:
    number = check_integer("n", n, accepted="n >= 1")
    if number < 1:
        raise ArgumentValueError("n", "must be 1 or more", came=number, accepted="n >= 1")
    return number
