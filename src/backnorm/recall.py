"""Calls that were seen before: from the arrays' metadata straight to the plan.

Checking a call's arguments takes longer than computing a small one. What the checks look at
(shapes, types, options) is the same in every step of a training loop, so their outcome is kept.
Values are never part of it, and whatever is not a plain array is left to the checks.
"""

from __future__ import annotations

from collections.abc import Hashable
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from backnorm.execute import Call
from backnorm.threads import get_num_threads

__all__ = ["Kept", "Recall", "metadata"]

V = TypeVar("V")

_MOST = 4096

# One call of C code an array. A dtype includes the byte order; the number has all flags.
_facts = attrgetter("__class__", "shape", "dtype", "flags.num")


def metadata(
    arrays: tuple[Any, ...], epsilon: object, data_format: object, flag: object
) -> Hashable | None:
    """Return all that the checks of a call look at, or None if it is not a usual call.

    Parameters
    ----------
    arrays : tuple of numpy.ndarray
        The arrays that were given.
    epsilon, data_format, flag
        The other arguments, and which arrays were not given.
    """
    # True == 1 == 1.0: a key cannot tell them apart.
    if type(epsilon) is not float or type(flag) is not bool or type(data_format) is not str:
        return None
    try:
        return (*map(_facts, arrays), epsilon, data_format, flag, get_num_threads())
    except AttributeError:
        return None


class Kept(dict[Hashable, V]):
    """What came of calls, by their metadata: for more than the layers of any model."""

    def keep(self, key: Hashable, value: V) -> None:
        """Keep a value; when there are too many, start afresh."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = value


class Recall(Kept[Call]):
    """The calls of one operator that need neither checks nor copies, by their metadata."""

    def remember(self, key: Hashable | None, call: Call, arrays: tuple[Any, ...]) -> None:
        """Keep a call of `arrays` that passed the checks, if the kernels take them as they are."""
        if key is not None and _plain(arrays):
            self.keep(key, call.for_plain_arrays())


def _plain(arrays: tuple[Any, ...]) -> bool:
    return all(
        type(array) is np.ndarray
        and array.flags.c_contiguous
        and array.flags.aligned
        and array.dtype.isnative
        for array in arrays
    )
