"""Measure a dialect's call: time, memory traffic, and errors against the oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import numpy as np

from backnorm import reference
from backnorm.conformance.judge import Verdict, judge
from backnorm.dialects.registry import CanonicalCall

Result = TypeVar("Result")


def timed(call: Callable[[], Result], repeat: int) -> tuple[Result, float]:
    """Return the result of `call` and the seconds that one call takes.

    The first call loads compiled code, or compiles it, and is not timed. The time is the median of
    `repeat` further calls.
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

    The convention counts the passes over arrays of x's size that two plain loops make, even if
    another order of work saves some of them:

    - backward: x and dy are read for the sums, and again for dx, which is written: 5 passes
      (4 with frozen statistics, where dx does not depend on x);
    - forward: x is read for the statistics, and again for y, which is written: 3 passes;
    - inference: x is read and y written: 2 passes.
    """
    backward = 5 if canonical.training else 4
    passes = {"backward": backward, "forward": 3, "inference": 2}[canonical.operation]
    return passes * inputs[canonical.inputs["x"]].nbytes


def check(
    canonical: CanonicalCall,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> dict[str, Verdict]:
    """Return a verdict for each output that the canonical operation has, by the dialect's names.

    Outputs that only the dialect has, such as running statistics, have no exact counterpart and
    no verdict.

    Parameters
    ----------
    canonical : CanonicalCall
        The canonical call that the dialect's call corresponds to.
    inputs, outputs : mapping of str to numpy.ndarray
        By the dialect's names.
    """
    operands = canonical.arrays(inputs)
    oracle = getattr(reference, canonical.operation)
    if canonical.operation == "backward":
        oracle = partial(oracle, training=canonical.training)
    exact = oracle(**operands, epsilon=canonical.epsilon, data_format=canonical.data_format)
    return {
        name: judge(
            role,  # type: ignore[arg-type]
            canonical.as_canonical(role, outputs[name]),
            getattr(exact, role),
            getattr(exact, f"{role}_terms"),
            operands["x"].dtype,
            arithmetic=canonical.arithmetic,
        )
        for role, name in canonical.outputs.items()
    }


def worst_errors(verdicts: Mapping[str, Verdict]) -> tuple[float, float]:
    """Return the largest error in ulps, and the largest error as a fraction of its budget."""
    ulps = [verdict.worst_ulp for verdict in verdicts.values()]
    return max(ulps, default=0.0), max((v.worst_excess for v in verdicts.values()), default=0.0)
