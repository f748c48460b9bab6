"""Grades of the results of a dialect's call, and of an elementwise operator of a graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from backnorm import reference
from backnorm.conformance._grade import Grade
from backnorm.conformance.judge._judge import judge
from backnorm.conformance.judge._pointwise import (
    check_dequantize,
    check_quantize,
    check_relu,
    check_relu_gradient,
)
from backnorm.dialects.registry import CanonicalCall

# The oracle and the judge use a few hundred bytes for each element. To limit this memory, they
# process one part of the arrays after another. A part has about this many elements.
_JUDGED_TOGETHER = 2**22


def check_call(
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
            name = canonical.outputs[role]
            if step < channels:
                grade = _shifted(grade, axis if actual.ndim > 1 else 0, start)
            grades[name] = _worse(grades.get(name), grade)
    return grades


def check_pointwise(
    op: str,
    attributes: Mapping[str, object],
    inputs: Mapping[str, np.ndarray],
    outputs: Mapping[str, np.ndarray],
) -> dict[str, Grade]:
    """Return the grade of the output of an operator of `graph.pointwise`."""
    ((name, result),) = outputs.items()
    arrays = {port: np.atleast_1d(array) for port, array in {**inputs, **outputs}.items()}
    length = len(arrays[name])
    step = max(1, _JUDGED_TOGETHER * length // max(1, result.size))
    grade: Grade | None = None
    for start in range(0, max(1, length), step):
        part = {port: array[start : start + step] for port, array in arrays.items()}
        judged = _check_elements(op, attributes, part, name)
        if step < length:
            judged = _shifted(judged, 0, start)
        grade = _worse(grade, judged)
    assert grade is not None
    return {name: grade}


def _check_elements(
    op: str, attributes: Mapping[str, object], arrays: Mapping[str, np.ndarray], name: str
) -> Grade:
    src, result = arrays["src"], arrays[name]
    if op == "ReLU":
        return check_relu(src, result)
    if op == "ReLUBackward":
        return check_relu_gradient(src, arrays["diff_dst"], result)
    if op == "Dequantize":
        return check_dequantize(src, result, attributes)
    return check_quantize(src, result, attributes, result.dtype)


def _channels(array: np.ndarray, axis: int, part: slice) -> np.ndarray:
    """Return the part of an array that has the channels in the slice `part`.

    The array is a data array with channels on `axis`, or has one value per channel.
    """
    return array[part] if array.ndim == 1 else array[(slice(None),) * axis + (part,)]


def _shifted(grade: Grade, axis: int, start: int) -> Grade:
    """Return the grade of the part of an output from `start` of an axis on. The index in the
    grade is converted to an index into the whole output.
    """
    where = grade.where
    if where:
        where = (*where[:axis], where[axis] + start, *where[axis + 1 :])
    detail = f"of the part from {start} of axis {axis}: {grade.detail}"
    return replace(grade, where=where, detail=detail)


def _worse(first: Grade | None, second: Grade) -> Grade:
    """Return the worse of the grades of two parts of an output, with the larger error in ulps."""
    if first is None:
        return second
    # A share can be NaN.
    worse = first if second.worst_excess <= first.worst_excess else second
    return replace(worse, worst_ulp=max(first.worst_ulp, second.worst_ulp))
