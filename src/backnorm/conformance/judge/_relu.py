"""Grades of batch normalisation that is fused with a ReLU, and optionally with a residual."""

from __future__ import annotations

from typing import Unpack

import numpy as np

from backnorm import reference
from backnorm.activations import RELU
from backnorm.arithmetics import Arithmetic
from backnorm.conformance._grade import Grade, refused
from backnorm.conformance.judge._passes import (
    check_backward,
    check_forward,
    check_inference,
)
from backnorm.layout import mask_size
from backnorm.reference import BackwardOptions, ForwardOptions


def check_relu_forward(
    x: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    result: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None],
    *,
    arithmetic: Arithmetic | None = None,
    **options: Unpack[ForwardOptions],
) -> dict[str, Grade]:
    """Judge `result` (y, mean, variance, mask); see :func:`reference.forward`.

    The mask is compared with the operator's y, not with the exact y: a bit must be set if and only
    if the operator's y is more than 0 and less than the ceiling of `activation`. The default of
    `activation` is a ReLU without ceiling.
    """
    ceiling = options.setdefault("activation", RELU).ceiling
    y, mean, variance, mask = result
    grades = check_forward(x, gamma, beta, (y, mean, variance), arithmetic=arithmetic, **options)
    mask_grade = _judge_mask(mask, y, x, ceiling)
    return grades | {"y": within_range(grades["y"], y, ceiling), "mask": mask_grade}


def check_relu_inference(
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    beta: np.ndarray | None,
    y: np.ndarray,
    *,
    arithmetic: Arithmetic | None = None,
    **options: Unpack[ForwardOptions],
) -> dict[str, Grade]:
    """Judge `y` of an inference pass with a ReLU: see :func:`reference.inference`."""
    ceiling = options.setdefault("activation", RELU).ceiling
    operands = x, mean, variance, gamma, beta
    grades = check_inference(*operands, y, arithmetic=arithmetic, **options)
    return {"y": within_range(grades["y"], y, ceiling)}


def check_relu_backward(
    x: np.ndarray,
    dy: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None,
    gradients: tuple[np.ndarray | None, ...],
    *,
    mask: np.ndarray,
    residual: bool = False,
    arithmetic: Arithmetic | None = None,
    **options: Unpack[BackwardOptions],
) -> dict[str, Grade]:
    """Judge `gradients` (dx, dgamma, dbeta, dresidual) of a layer with a ReLU that has this mask.

    If `residual` is True, dresidual must be dy where the mask is set, and 0 elsewhere. If
    `residual` is False, dresidual must be absent or None.
    """
    dx, dgamma, dbeta, *rest = gradients
    assert dx is not None
    assert dgamma is not None
    assert dbeta is not None
    gradient, exact = reference.masked(dy, mask, x), (dx, dgamma, dbeta)
    grades = check_backward(
        x, gradient, mean, variance, gamma, exact, arithmetic=arithmetic, **options
    )
    dresidual = _judge_dresidual(rest[0] if rest else None, gradient if residual else None)
    return grades | {"dresidual": dresidual}


def within_range(grade: Grade, y: np.ndarray, ceiling: float | None) -> Grade:
    """Return `grade`, or a failure if an element of y is outside the ReLU's range.

    There is no tolerance: a single element slightly outside the range is a failure.
    """
    values = y.astype(np.float64)
    if grade.passed and (values < 0).any():
        return refused(f"y is negative {int((values < 0).sum())} times")
    if grade.passed and ceiling is not None and (values > ceiling).any():
        return refused(f"y is more than {ceiling} {int((values > ceiling).sum())} times")
    return grade


def _judge_mask(
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


def _judge_dresidual(actual: np.ndarray | None, expected: np.ndarray | None) -> Grade:
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
