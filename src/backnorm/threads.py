"""How many threads the kernels use: a setting of the process."""

from __future__ import annotations

import numpy as np

from backnorm import config, machine
from backnorm.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["get_num_threads", "set_num_threads"]

_threads: int | None = None


def set_num_threads(n: int) -> None:
    """Set how many threads backnorm's kernels use.

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
    Results do not depend on it: they are the same bits for any number of threads.
    """
    global _threads
    if isinstance(n, bool | np.bool_) or not isinstance(n, int | np.integer):
        raise ArgumentTypeError(
            "n", "must be an integer", came=f"{n!r} of type {type(n).__name__}", accepted="n >= 1"
        )
    if n < 1:
        raise ArgumentValueError("n", "must be 1 or more", came=n, accepted="n >= 1")
    _threads = min(int(n), machine.detect().threads)


def get_num_threads() -> int:
    """Return how many threads backnorm's kernels use."""
    if _threads is None:
        available = machine.detect().threads
        set_num_threads(config.initial_threads() or available)
    assert _threads is not None
    return _threads
