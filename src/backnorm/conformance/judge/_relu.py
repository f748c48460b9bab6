"""Grades of what a ReLU adds to batch normalisation: range, mask, and the residual's gradient."""

from __future__ import annotations

import numpy as np

from backnorm import reference
from backnorm.activations import Activation
from backnorm.conformance._grade import Grade, refused
from backnorm.layout import mask_size


def within_range(grade: Grade, y: np.ndarray, activation: Activation | None) -> Grade:
    """Return `grade`, or a failure if an element of y is outside the range of a ReLU.

    There is no tolerance: a single element slightly outside the range is a failure.
    """
    if activation is None or activation.name != "relu" or not grade.passed:
        return grade
    values, ceiling = y.astype(np.float64), activation.ceiling
    if (values < 0).any():
        return refused(f"y is negative {int((values < 0).sum())} times")
    if ceiling is not None and (values > ceiling).any():
        return refused(f"y is more than {ceiling} {int((values > ceiling).sum())} times")
    return grade


def judge_mask(
    mask: np.ndarray | None, y: np.ndarray, x: np.ndarray, ceiling: float | None
) -> Grade:
    if mask is None:
        return refused("mask is absent")
    if mask.dtype != np.uint8 or mask.ndim != 1 or mask.size < mask_size(x.size):
        return refused(
            f"mask is {mask.dtype} of shape {mask.shape}, not uint8 of at least "
            f"{mask_size(x.size)} elements"
        )
    if y.shape != x.shape:
        return refused(f"y has shape {y.shape}, not {x.shape}")
    return judge_equal("mask", reference.unpack_mask(mask, x), reference.counting(y, ceiling))


def judge_dresidual(actual: np.ndarray | None, expected: np.ndarray | None) -> Grade:
    if actual is None or expected is None:
        if actual is expected:
            return Grade("exact", detail="dresidual is absent, as it must be")
        return refused(f"dresidual is {'missing' if actual is None else 'not absent'}")
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return refused(
            f"dresidual is {actual.dtype} of shape {actual.shape}, "
            f"not {expected.dtype} of shape {expected.shape}"
        )
    return judge_equal("dresidual", actual.astype(np.float64), expected.astype(np.float64))


def judge_equal(quantity: str, actual: np.ndarray, expected: np.ndarray) -> Grade:
    """Judge an output that must equal the expected one, with NaN where NaN is expected."""
    different = (actual != expected) & ~((actual != actual) & (expected != expected))
    if not different.any():
        return Grade("exact", detail=f"{quantity} equals the expected output")
    where = tuple(int(i) for i in np.argwhere(different)[0])
    return refused(
        f"{quantity}[{', '.join(map(str, where))}] = {actual[where]!s}, not {expected[where]!s}; "
        f"wrong in {int(different.sum())} of {different.size} elements"
    )
