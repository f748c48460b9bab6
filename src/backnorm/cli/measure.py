"""Measure a call: its time, and the memory traffic of a dialect's call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from backnorm.dialects.registry import CanonicalCall

Result = TypeVar("Result")


def timed(call: Callable[[], Result], repeat: int) -> tuple[Result, float]:
    """Return the result of `call` and the seconds that one call takes.

    The first call loads machine code, and is not timed. The time is the median of `repeat` further
    calls.
    """
    result = call()
    seconds = []
    for _ in range(repeat):
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
    return result, statistics.median(seconds)


def traffic(canonical: CanonicalCall, inputs: Mapping[str, np.ndarray]) -> int:
    """Return the bytes that a call moves between memory and processor, by the convention below.

    The convention assumes that plain loops compute the call: one loop for the sums (if there are
    any), and one for the output. It counts how often these loops read or write an array of x's
    size. Reading or writing such an array once is a pass. All passes of these loops are counted,
    even if the kernel itself needs fewer:

    - backward: x and dy are read for the sums, and again for dx, which is written: 5 passes
      (4 with frozen statistics, where dx does not depend on x);
    - forward: x is read for the statistics, and again for y, which is written: 3 passes;
    - inference: x is read and y written: 2 passes.
    """
    backward = 5 if canonical.training else 4
    passes = {"backward": backward, "forward": 3, "inference": 2}[canonical.operation]
    return passes * inputs[canonical.inputs["x"]].nbytes
