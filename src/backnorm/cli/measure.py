"""Measure a dialect's call: time, memory traffic, and errors against the oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from backnorm import reference
from backnorm.conformance.judge import judge
from backnorm.conformance.judge._pointwise import (
    check_dequantize,
    check_quantize,
    check_relu,
    check_relu_gradient,
)
from backnorm.conformance.judge._relu import within_range
from backnorm.conformance.ladder import Grade
from backnorm.dialects.registry import CanonicalCall
from backnorm.graph.program import Step

Result = TypeVar("Result")

# The oracle and the judge use a few hundred bytes for each element. To limit this memory, they
# process one group of channels after another. A group has about this many elements.
_JUDGED_TOGETHER = 2**22


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


def check(
    canonical: CanonicalCall,
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> dict[str, Grade]:
    """Return the grades of a call's outputs that backnorm's own operation has, too.

    The keys of the result are the dialect's names of these outputs. Outputs that only the dialect
    has, such as running statistics, have no exact counterpart and no grade.

    Parameters
    ----------
    canonical : CanonicalCall
        The canonical call that the dialect's call corresponds to.
    inputs, outputs : mapping of str to numpy.ndarray
        By the dialect's names.
    """
    operands = canonical.arrays(inputs)
    results = {
        role: canonical.as_canonical(role, outputs[name])
        for role, name in canonical.outputs.items()
    }
    oracle = getattr(reference, canonical.operation)
    if canonical.operation == "backward":
        oracle = partial(oracle, training=canonical.training)
    elif canonical.activation is not None:
        oracle = partial(oracle, activation=canonical.activation)
    oracle = partial(oracle, epsilon=canonical.epsilon, data_format=canonical.data_format)
    x = operands["x"]
    axis = 1 if canonical.data_format == "NCX" else x.ndim - 1
    channels = x.shape[axis]
    step = max(1, _JUDGED_TOGETHER * channels // max(1, x.size))
    grades: dict[str, Grade] = {}
    for start in range(0, max(1, channels), step):
        part = slice(start, start + step)
        exact = oracle(**{role: _channels(a, axis, part) for role, a in operands.items()})
        for role, result in results.items():
            actual = _channels(result, axis, part)
            grade = judge(
                role,  # type: ignore[arg-type]
                actual,
                getattr(exact, role),
                getattr(exact, f"{role}_terms"),
                x.dtype,
                arithmetic=canonical.arithmetic,
            )
            if role == "y" and canonical.activation is not None:
                grade = within_range(grade, actual, canonical.activation.ceiling)
            name = canonical.outputs[role]
            if step < channels:
                grade = _shifted(grade, axis if actual.ndim > 1 else 0, start)
            grades[name] = _worse(grades.get(name), grade)
    return grades


def check_pointwise(
    step: Step, inputs: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, Grade]:
    """Return the grade of the output of an operator of `graph.pointwise`."""
    ((name, result),) = outputs.items()
    src = inputs["src"]
    if step.op == "ReLU":
        grade = check_relu(src, result)
    elif step.op == "ReLUBackward":
        grade = check_relu_gradient(src, inputs["diff_dst"], result)
    elif step.op == "Dequantize":
        grade = check_dequantize(src, result, step.attributes)
    else:
        assert step.dtype is not None
        grade = check_quantize(src, result, step.attributes, step.dtype)
    return {name: grade}


def _channels(array: np.ndarray, axis: int, part: slice) -> np.ndarray:
    """Return the part of an array that has the channels in the slice `part`.

    The array is a data array with channels on `axis`, or has one value per channel.
    """
    return array[part] if array.ndim == 1 else array[(slice(None),) * axis + (part,)]


def _shifted(grade: Grade, axis: int, start: int) -> Grade:
    """Return the grade of the channels of an output from `start` on. The index in the grade is
    converted to an index into the whole output.
    """
    where = grade.where
    if where:
        where = (*where[:axis], where[axis] + start, *where[axis + 1 :])
    detail = f"of the channels from {start}: {grade.detail}"
    return replace(grade, where=where, detail=detail)


def _worse(first: Grade | None, second: Grade) -> Grade:
    """Return the worse of the grades of two parts of an output, with the larger error in ulps."""
    if first is None:
        return second
    # A share can be NaN.
    worse = first if second.worst_excess <= first.worst_excess else second
    return replace(worse, worst_ulp=max(first.worst_ulp, second.worst_ulp))


def worst_errors(grades: Mapping[str, Grade]) -> tuple[float, float]:
    """Return the largest error in ulps, and the largest quotient of an error and its budget."""
    ulps = [grade.worst_ulp for grade in grades.values()]
    return max(ulps, default=0.0), max((v.worst_excess for v in grades.values()), default=0.0)
