"""Calls that were seen before: from the arrays' metadata straight to the plan.

Checking a call's arguments takes longer than computing a small one. What the checks look at
(shapes, types, options) is the same in every step of a training loop, so their outcome is kept.
Values are never part of it, and whatever is not a plain array is left to the checks.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, TypeVar

import numpy as np

from backnorm.execute import Call
from backnorm.threads import get_num_threads

__all__ = ["Kept", "Recall", "metadata"]

V = TypeVar("V")

_MOST = 4096


def metadata(
    x: Any,
    dy: Any,
    mean: Any,
    variance: Any,
    gamma: Any,
    beta: Any,
    epsilon: object,
    data_format: object,
    training: object,
) -> Hashable | None:
    """Return all that the checks of a call look at, or None if it is not a usual call.

    Parameters
    ----------
    x, dy, mean, variance, gamma, beta : numpy.ndarray or None
    epsilon, data_format, training
        The other arguments.
    """
    # True == 1 == 1.0: a key cannot tell them apart.
    if type(epsilon) is not float or type(training) is not bool or type(data_format) is not str:
        return None
    try:
        # Written out, because a loop over the arrays takes half as long again. A dtype includes the
        # byte order; the number has all flags.
        return (
            (x.__class__, x.shape, x.dtype, x.flags.num),
            None if dy is None else (dy.__class__, dy.shape, dy.dtype, dy.flags.num),
            None if mean is None else (mean.__class__, mean.shape, mean.dtype, mean.flags.num),
            None
            if variance is None
            else (variance.__class__, variance.shape, variance.dtype, variance.flags.num),
            None if gamma is None else (gamma.__class__, gamma.shape, gamma.dtype, gamma.flags.num),
            None if beta is None else (beta.__class__, beta.shape, beta.dtype, beta.flags.num),
            epsilon,
            data_format,
            training,
            get_num_threads(),
        )
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
        """Keep a call that passed the checks, if the kernels take what was given as it is.

        What is given as another kind of object is not remembered: kernels take addresses.
        """
        if key is not None and _plain(arrays):
            self.keep(key, call.for_plain_arrays())


def _plain(arrays: tuple[Any, ...]) -> bool:
    return all(
        array is None
        or (
            type(array) is np.ndarray
            and array.flags.c_contiguous
            and array.flags.aligned
            and array.dtype.isnative
        )
        for array in arrays
    )
