"""Time a call, and say how much memory traffic it amounts to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from backnorm.dialects.registry import CanonicalCall

__all__ = ["timed", "traffic"]

Result = TypeVar("Result")


def timed(call: Callable[[], Result], repeat: int) -> tuple[Result, float]:
    """Return the result of `call` and the seconds that one call takes.

    The first call loads compiled code, or compiles it, and does not count; the time is the median
    of `repeat` further calls.
    """
    result = call()
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
    return result, statistics.median(seconds)


def traffic(canonical: CanonicalCall, inputs: Mapping[str, np.ndarray]) -> int:
    """Return the bytes that a canonical call moves between memory and processor, by convention.

    Counted are the passes over arrays of x's size that two plain loops make, whatever a cleverer
    order of work saves of them:

    - backward: x and dy are read for the sums, and again for dx, which is written: 5 passes
      (4 with frozen statistics, where dx does not depend on x);
    - forward: x is read for the statistics, and again for y, which is written: 3 passes;
    - inference: x is read and y written: 2 passes.
    """
    if canonical.operation == "backward":
        passes = 5 if canonical.training else 4
    else:
        passes = 3 if canonical.operation == "forward" else 2
    return passes * inputs[canonical.inputs["x"]].nbytes
