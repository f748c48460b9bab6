"""The grade of an output, and the rungs that it can have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from backnorm.dtypes import FLOAT64
from backnorm.errors import ArgumentValueError, described
from backnorm.reference import FloatArray

Rung = Literal["exact", "float64", "float32", "pairwise", "blocked", "serial"]
Status = Rung | Literal["wrong", "nonfinite"]
BoundKind = Literal["expected", "guaranteed"]

#: The rungs of the ladder, best first.
RUNGS: tuple[Rung, ...] = get_args(Rung)

KINDS: tuple[BoundKind, ...] = get_args(BoundKind)


@dataclass(frozen=True, slots=True)
class Grade:
    """Outcome of comparing one output with its exact value.

    Attributes
    ----------
    status : str
        The best rung whose bound holds for all elements; "wrong" if no bound holds; "nonfinite" if
        an element is NaN or infinite where the exact value is not, or the other way round. A
        function of `judge` tries one rung, that of the arithmetic; a ladder tries all.
    worst_ulp : float
        Largest error of all elements, in ulps of the output's type at the exact value.
    share : dict
        For each rung, the largest error as a multiple of the bound. Rungs that were not tried, that
        do not exist for the type of the data, or that have an infinite bound, are left out.
    where : tuple of int
        Index of the element that excludes the next better rung, or the element with the largest
        share if one rung was tried; empty if the output is empty, or if no error was measured.
    got, exact : float
        The output and the exact value at `where`.
    ulp : float
        The error at `where`, in ulps.
    condition : float
        T / abs(exact) at `where`: the error of the result, in roundoffs, if each term has an error
        of one roundoff.
    detail : str
        The value of the element at `where`, the exact value, the error and the error that the last
        rung allows; or the outcome in words if no error was measured.
    """

    status: Status
    worst_ulp: float = 0.0
    share: Mapping[Rung, float] = field(default_factory=dict)
    where: tuple[int, ...] = ()
    got: float = 0.0
    exact: float = 0.0
    ulp: float = 0.0
    condition: float = 1.0
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether the bound of a rung holds for all elements."""
        return self.status in RUNGS

    @property
    def worst_excess(self) -> float:
        """Largest error as a multiple of the bound of the last rung; infinite if the output failed
        without a measured error.
        """
        return [0.0 if self.passed else math.inf, *self.share.values()][-1]

    def at_least(self, rung: Rung) -> bool:
        """Whether the status is this rung or a better one."""
        return is_at_least(self.status, rung)


def refused(detail: str) -> Grade:
    """Return the grade of an output that is wrong, without a measured error."""
    return Grade("wrong", math.inf, detail=detail)


def is_at_least(status: str, rung: Rung) -> bool:
    """Whether a status is this rung or a better one; False for "wrong" and "nonfinite"."""
    check_word("rung", rung, RUNGS)
    return status in RUNGS[: RUNGS.index(rung) + 1]


def rungs(data: np.dtype) -> tuple[Rung, ...]:
    """Return the rungs for data of this type; float64 data has no rung "float32"."""
    return tuple(rung for rung in RUNGS if rung != "float32" or data != FLOAT64)


def best_rung(
    name: str,
    actual: np.ndarray,
    exact: FloatArray,
    error: FloatArray,
    ulp: FloatArray,
    bounds: Mapping[Rung, FloatArray],
    terms: FloatArray | None = None,
) -> Grade:
    """Return the grade of an output; an empty output is exact.

    Parameters
    ----------
    name : str
        The output's name.
    actual, exact : numpy.ndarray
        The output, and the exact values in float64.
    error, ulp : numpy.ndarray
        The absolute error of each element, and the unit in the last place at its exact value.
    bounds : mapping
        The allowed absolute error of each element on each rung, best rung first.
    terms : numpy.ndarray, optional
        T of each element; None: each condition is 1.
    """
    if actual.size == 0:
        return Grade("exact", share=dict.fromkeys(bounds, 0.0), detail=f"{name} is empty")
    shares: dict[Rung, float] = {}
    worst: dict[Rung, int] = {}
    with np.errstate(all="ignore"):
        for rung, allowed in bounds.items():
            excess = error / allowed
            worst[rung] = int(np.argmax(excess))
            shares[rung] = float(excess.flat[worst[rung]])
    tried = tuple(bounds)
    allowed = bounds[tried[-1]]
    place = next((i for i, rung in enumerate(tried) if shares[rung] <= 1.0), len(tried))
    status: Status = tried[place] if place < len(tried) else "wrong"
    index = worst[tried[max(place - 1, 0)]]
    if status == "wrong":
        finite = np.isfinite(actual.astype(np.float64)) & np.isfinite(exact)
        disagreeing = ~finite & ~(error <= allowed)
        if disagreeing.any():
            status, index = "nonfinite", int(np.argmax(disagreeing))
    where = tuple(int(i) for i in np.unravel_index(index, exact.shape))
    with np.errstate(all="ignore"):
        ulps, size = error / ulp, np.abs(exact[where])
        condition = 1.0 if terms is None else float(terms[where] / size)
        detail = (
            f"{name}[{', '.join(map(str, where))}] = {actual[where]!s}, "
            f"exact {exact[where]:.17g}, error {ulps[where]:.4g} ulp, "
            f"allowed {(allowed / ulp)[where]:.4g} ulp"
        )
    values = float(actual[where]), float(exact[where]), float(ulps[where])
    return Grade(status, float(ulps.max()), shares, where, *values, condition, detail)


def check_word(argument: str, word: object, accepted: tuple[str, ...]) -> None:
    """Raise an error for a word that is not accepted."""
    if word not in accepted:
        raise ArgumentValueError(
            argument, "unknown", came=described(word), accepted=", ".join(accepted)
        )
