"""The rungs of the ladder, and the grade of an output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from backnorm.conformance.judge._ulps import absolute_error, ulp_at
from backnorm.dtypes import FLOAT64
from backnorm.errors import ArgumentValueError, described
from backnorm.reference import Exact, FloatArray

Rung = Literal["exact", "float64", "float32", "pairwise", "blocked", "serial"]
Status = Rung | Literal["wrong", "nonfinite"]
BoundKind = Literal["expected", "guaranteed"]

#: The rungs of the ladder, best first.
RUNGS: tuple[Rung, ...] = get_args(Rung)

KINDS: tuple[BoundKind, ...] = get_args(BoundKind)


@dataclass(frozen=True, slots=True)
class Grade:
    """Outcome of grading one output.

    Attributes
    ----------
    status : str
        The best rung whose bound holds for all elements; "wrong" if no bound holds; "nonfinite" if
        an element is NaN or infinite where the exact value is not, or the other way round.
    worst_ulp : float
        Largest error of all elements, in ulps of the output's type at the exact value.
    share : dict
        For each rung, the largest error as a multiple of the bound. Rungs that do not exist for the
        type of the data, and rungs with an infinite bound, are left out.
    where : tuple of int
        Index of the element that excludes the next better rung; empty for an empty output.
    got, exact : float
        The output and the exact value at `where`.
    ulp : float
        The error at `where`, in ulps.
    condition : float
        T / abs(exact) at `where`: the error of the result, in roundoffs, if each term has an error
        of one roundoff.
    """

    status: Status
    worst_ulp: float
    share: Mapping[Rung, float]
    where: tuple[int, ...]
    got: float
    exact: float
    ulp: float
    condition: float

    def at_least(self, rung: Rung) -> bool:
        """Whether the status is this rung or a better one."""
        return is_at_least(self.status, rung)


def is_at_least(status: str, rung: Rung) -> bool:
    """Whether a status is this rung or a better one; False for "wrong" and "nonfinite"."""
    check_word("rung", rung, RUNGS)
    return status in RUNGS[: RUNGS.index(rung) + 1]


def rungs(data: np.dtype) -> tuple[Rung, ...]:
    """Return the rungs for data of this type; float64 data has no rung "float32"."""
    return tuple(rung for rung in RUNGS if rung != "float32" or data != FLOAT64)


def best_rung(
    actual: np.ndarray,
    exact: Exact,
    terms: FloatArray,
    bounds: Mapping[Rung, FloatArray],
    output: np.dtype,
) -> Grade:
    """Return the grade of an output that is not empty.

    Parameters
    ----------
    actual, exact, terms
        As in :func:`backnorm.conformance.ladder.grade`.
    bounds : mapping
        The allowed absolute error of each element on each rung, best rung first.
    output : numpy.dtype
        The element type of `actual`.
    """
    error, ulp = absolute_error(actual, exact, output), ulp_at(exact, output)
    shares: dict[Rung, float] = {}
    worst: dict[Rung, int] = {}
    with np.errstate(all="ignore"):
        for rung, allowed in bounds.items():
            excess = error / allowed
            worst[rung] = int(np.argmax(excess))
            shares[rung] = float(excess.flat[worst[rung]])
    ladder = tuple(bounds)
    allowed = bounds[ladder[-1]]
    place = next((i for i, rung in enumerate(ladder) if shares[rung] <= 1.0), len(ladder))
    status: Status = ladder[place] if place < len(ladder) else "wrong"
    index = worst[ladder[max(place - 1, 0)]]
    if status == "wrong":
        finite = np.isfinite(actual.astype(np.float64)) & np.isfinite(exact.hi)
        disagreeing = ~finite & ~(error <= allowed)
        if disagreeing.any():
            status, index = "nonfinite", int(np.argmax(disagreeing))
    where = tuple(int(i) for i in np.unravel_index(index, exact.shape))
    with np.errstate(all="ignore"):
        ulps, condition = error / ulp, float(terms[where] / np.abs(exact.hi[where]))
    values = float(actual[where]), float(exact.hi[where]), float(ulps[where])
    return Grade(status, float(ulps.max()), shares, where, *values, condition)


def check_word(argument: str, word: object, accepted: tuple[str, ...]) -> None:
    """Raise an error for a word that is not accepted."""
    if word not in accepted:
        raise ArgumentValueError(
            argument, "unknown", came=described(word), accepted=", ".join(accepted)
        )
