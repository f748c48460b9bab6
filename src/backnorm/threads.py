"""Limits of the number of threads of a call: the process's, a ``with`` block's and PyTorch's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from sys import modules
from time import monotonic

from backnorm import config, machine
from backnorm.errors import ArgumentValueError
from backnorm.scalars import check_integer

#: The limit that `set_num_threads` set; None: the default limit.
_most: int | None = None

#: The limit of the current ``with num_threads(n)`` block.
_allowed: ContextVar[int | None] = ContextVar("backnorm_num_threads", default=None)

# `_beside` is the default limit if PyTorch is imported, and `_alone` if it is not. Both limits are
# computed again when the time `_until` has passed, because the number of processors that the
# process may use can change.
_beside, _alone, _until = 1, 1, 0.0


def set_num_threads(n: int) -> None:
    """Set the largest number of threads of a call of backnorm, in the whole process.

    Parameters
    ----------
    n : int
        1 or more. It is capped to the number of processors that this process may use.

    Raises
    ------
    ArgumentTypeError, ArgumentValueError
        If n is not an integer of 1 or more.

    Notes
    -----
    Results have the same bits for any number of threads. In a process that has imported PyTorch, a
    call never has more threads than ``torch.get_num_threads()`` returns.
    """
    global _most
    _most = min(_checked(n), machine.processors())


@contextlib.contextmanager
def num_threads(n: int) -> Iterator[None]:
    """Limit the threads of each call in a ``with`` block; other Python threads keep their limits.

    Parameters
    ----------
    n : int
        1 or more. It never raises the limit of `set_num_threads` or of an outer block.

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
    """Return how many threads a call of backnorm may have now, in this thread.

    This is the least of

    - the limit of `set_num_threads`; if this function was not called, BACKNORM_NUM_THREADS; if
      this variable is not set and PyTorch is not imported, OMP_NUM_THREADS;
    - the limit of the `num_threads` block;
    - the number of processors that this process may use;
    - ``torch.get_num_threads()``, if PyTorch is imported.
    """
    torch = modules.get("torch")
    most = _most
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
    except AttributeError:  # PyTorch is being imported
        return most
    return number if number < most else most


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
