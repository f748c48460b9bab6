"""Judge whether an output is within its error budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backnorm.arithmetics import Arithmetic
from backnorm.conformance.judge._budget import Quantity, budget
from backnorm.conformance.judge._ulps import absolute_error, ulp_at
from backnorm.dtypes import FLOAT64, element_type
from backnorm.reference import (
    Exact,
    ExactGradients,
    ExactNormalized,
    ExactOutput,
    ExactSecondGradients,
    FloatArray,
)

Record = ExactGradients | ExactNormalized | ExactOutput | ExactSecondGradients


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of comparing an output with its exact value.

    Attributes
    ----------
    worst_ulp : float
        Largest error, in ulps of the output's type at the exact value.
    worst_excess : float
        Largest error as a multiple of the error that :func:`budget` allows for that element.
    passed : bool
        True if every element is within its budget (``worst_excess <= 1``), and NaN and infinity
        occur exactly where they are expected.
    where : tuple of int
        Index of the element with `worst_excess`; empty if the output is empty, or has no measured
        error.
    detail : str
        The value of that element, the exact value, the error and the allowed error; or the outcome
        in words if no error was measured.
    """

    worst_ulp: float
    worst_excess: float
    passed: bool
    where: tuple[int, ...]
    detail: str


def judge(
    quantity: Quantity,
    actual: np.ndarray,
    exact: Exact,
    terms: FloatArray,
    dtype: np.dtype,
    *,
    more: float = 0.0,
    arithmetic: Arithmetic | None = None,
) -> Verdict:
    """Judge whether the error of every element of `actual` is within the budget of the element.

    Parameters
    ----------
    quantity : str
        The quantity, for :func:`budget`.
    actual : numpy.ndarray
        The output to judge, in the type that it was rounded to.
    exact : Exact
        Exact values.
    terms : numpy.ndarray
        float64: T of each element.
    dtype : numpy.dtype
        Element type of x.
    more : float
        A multiple of T that is allowed in addition to the budget.
    arithmetic : {"float32", "float64"}, optional
        The compute dtype, for :func:`budget`.
    """
    output, data = element_type(actual.dtype), element_type(dtype)
    if output is None or data is None:
        return refused(f"{quantity} has element type {actual.dtype}, which is not supported")
    if actual.shape != exact.shape:
        return refused(f"{quantity} has shape {actual.shape}, not {exact.shape}")
    if actual.size == 0:
        return Verdict(0.0, 0.0, True, (), f"{quantity} is empty")
    allowance = budget(quantity, output, data, arithmetic)
    error, ulp = absolute_error(actual, exact, output), ulp_at(exact, output)
    with np.errstate(all="ignore"):
        # T (`terms`, the sum of magnitudes) may be infinite or NaN where the exact result is
        # finite. There T adds nothing to the allowed error.
        slack = np.where(np.isfinite(terms), terms, 0.0) * (allowance.terms + more)
        # The oracle computes with pairs of float64, which cannot represent parts below 2**-1074. So
        # the oracle's results may have an error of this size.
        allowed = allowance.ulps * ulp + slack + (2.0**-1074 if output == FLOAT64 else 0.0)
        excess = error / allowed
        ulps, allowed_ulps = error / ulp, allowed / ulp
    worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
    where = tuple(int(i) for i in worst)
    worst_excess = float(excess[where])
    detail = (
        f"{quantity}[{', '.join(map(str, where))}] = {actual[where]!s}, "
        f"exact {exact.hi[where]:.17g}, error {ulps[where]:.4g} ulp, "
        f"allowed {allowed_ulps[where]:.4g} ulp"
    )
    return Verdict(float(ulps.max()), worst_excess, bool(worst_excess <= 1.0), where, detail)


def judge_all(
    exact: Record,
    quantities: Sequence[Quantity],
    outputs: Sequence[np.ndarray],
    types: Sequence[np.dtype | None],
    data: np.dtype,
    arithmetic: Arithmetic | None = None,
    more: Sequence[float] | None = None,
) -> dict[str, Verdict]:
    """Judge each output against its exact value, which is a field of the oracle's result `exact`.

    Parameters
    ----------
    exact : ExactGradients, ExactNormalized, ExactOutput or ExactSecondGradients
    quantities : sequence of str
        The quantity of each output. Without a prefix "second_", it is the name of the field.
    outputs : sequence of numpy.ndarray
    types : sequence of numpy.dtype or None
        The element type that each output must have; None: any.
    data, arithmetic
        As in :func:`judge`.
    more : sequence of float
        As in :func:`judge`, for each output; None: 0.
    """
    more = [0.0] * len(quantities) if more is None else more
    verdicts = {}
    for quantity, actual, expected, extra in zip(quantities, outputs, types, more, strict=True):
        name = quantity.removeprefix("second_")
        if expected is not None and element_type(actual.dtype) != element_type(expected):
            verdicts[name] = refused(f"{quantity} has element type {actual.dtype}, not {expected}")
            continue
        known = getattr(exact, name), getattr(exact, f"{name}_terms")
        verdicts[name] = judge(quantity, actual, *known, data, more=extra, arithmetic=arithmetic)
    return verdicts


def refused(detail: str) -> Verdict:
    """Return a failed verdict without a measured error: the errors count as infinite."""
    return Verdict(math.inf, math.inf, False, (), detail)
