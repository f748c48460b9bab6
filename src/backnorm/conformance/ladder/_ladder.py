"""The frame of a ladder: exact results of a call, and the bounds of their errors on each rung."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from backnorm.conformance._grade import (
    KINDS,
    BoundKind,
    Grade,
    Rung,
    best_rung,
    check_word,
    rungs,
)
from backnorm.conformance._ulps import absolute_error, ulp_at
from backnorm.conformance.judge import Quantity
from backnorm.conformance.ladder._arguments import read_results
from backnorm.dtypes import FLOAT64, element_type
from backnorm.errors import ArgumentTypeError, ArgumentValueError
from backnorm.reference import Exact, FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Ladder(ABC):
    """The exact results of a call, and the bounds of their errors.

    Attributes
    ----------
    values : ExactGradients or ExactNormalized of backnorm.reference
        The exact results.
    data : numpy.dtype
        Element type of x.
    count : int
        M, the elements of a channel.
    """

    #: The names of the results that backnorm's operation returns, and of those that only operators
    #: of specifications have.
    results: ClassVar[tuple[Quantity, ...]]
    more: ClassVar[tuple[Quantity, ...]] = ()
    #: Whether results of channels without elements are undefined, so that any result is exact.
    needs_elements: ClassVar[bool] = False

    values: Any
    data: np.dtype
    count: int
    # The bounds that were asked for. Many results of a call are graded if mistakes are looked for.
    _allowed: dict[tuple[Any, ...], dict[Rung, FloatArray]] = field(
        default_factory=dict, init=False, repr=False
    )

    @abstractmethod
    def slack(
        self, name: Quantity, rung: Rung, kind: BoundKind, output: np.dtype, below: np.ndarray
    ) -> FloatArray:
        """Return the bound of each element's error before the last rounding.

        Elements are infinite where the error analysis (``docs/tolerance.md``) gives no bound.

        Parameters
        ----------
        name, rung, kind, output
            As in :meth:`allowances`; `rung` is not "exact".
        below : numpy.ndarray
            Whether the result is less than the exact value.
        """

    @abstractmethod
    def element_type(self, name: Quantity) -> np.dtype | None:
        """Return the element type that a result has to have; None: any."""

    def value(self, name: Quantity) -> Exact:
        """Return the exact value of a result."""
        value: Exact = getattr(self.values, name)
        return value

    def terms(self, name: Quantity) -> FloatArray:
        """Return T of each element of a result: the sum of the magnitudes of its terms."""
        terms: FloatArray = getattr(self.values, f"{name}_terms")
        return terms

    def grade(self, name: Quantity, actual: np.ndarray, *, kind: BoundKind = "expected") -> Grade:
        """Return the best rung whose bound holds for every element of a result.

        Parameters
        ----------
        name : str
            A name in `results` or `more`.
        actual : numpy.ndarray
            The result, in the type that it was rounded to.
        kind : {"expected", "guaranteed"}
            The kind of bounds, as in :func:`backnorm.conformance.ladder.bound`. An expected bound
            is never more than the guaranteed one.

        Raises
        ------
        ArgumentTypeError, ArgumentValueError
            For an element type without bounds, and for a wrong shape.
        """
        check_word("name", name, (*self.results, *self.more))
        output, exact = element_type(actual.dtype), self.value(name)
        if output is None:
            raise ArgumentTypeError(name, "has an unsupported element type", came=actual.dtype)
        if actual.shape != exact.shape:
            raise ArgumentValueError(
                name,
                "must have the shape of the exact result",
                came=str(actual.shape),
                accepted=str(exact.shape),
            )
        below = actual.astype(FLOAT64) < exact.hi
        bounds = self.allowances(name, output, kind=kind, below=below)
        if self.needs_elements and self.count == 0:
            return Grade("exact", share=dict.fromkeys(bounds, 0.0))
        error, ulp = absolute_error(actual, exact, output), ulp_at(exact, output)
        return best_rung(name, actual, exact.hi, error, ulp, bounds, self.terms(name))

    def grades(
        self, argument: str, results: object, kind: BoundKind = "expected"
    ) -> dict[Quantity, Grade]:
        """Grade all results, which a caller passes in one argument; see :func:`read_results`."""
        types = {n: (self.value(n).shape, self.element_type(n)) for n in self.results}
        actual = read_results(argument, results, types)
        return {name: self.grade(name, array, kind=kind) for name, array in actual.items()}

    def allowances(
        self,
        name: Quantity,
        output: np.dtype,
        *,
        kind: BoundKind = "expected",
        below: np.ndarray | bool = False,
    ) -> dict[Rung, FloatArray]:
        """Return the allowed absolute error of each element on each rung, best rung first.

        A rung is left out if the error analysis gives no bound for one of the elements.

        Parameters
        ----------
        name : str
            A name in `results` or `more`.
        output : numpy.dtype
            Element type of the result.
        kind : {"expected", "guaranteed"}
        below : numpy.ndarray or bool
            Whether the result is less than the exact value; only the bound of the variance differs.
        """
        check_word("kind", kind, KINDS)
        below = np.asarray(below)
        key = name, output, kind, below.tobytes() if name == "variance" else b""
        if key not in self._allowed:
            self._allowed[key] = self._allowances(name, output, kind, below)
        return self._allowed[key]

    def _allowances(
        self, name: Quantity, output: np.dtype, kind: BoundKind, below: np.ndarray
    ) -> dict[Rung, FloatArray]:
        exact = self.value(name)
        half, finite = 0.5 * ulp_at(exact, output), np.isfinite(exact.hi)
        kinds: list[BoundKind] = ["guaranteed", "expected"] if kind == "expected" else [kind]
        # The oracle returns a value as a pair of float64. Such a pair cannot represent parts below
        # 2**-1074, so the value can have an error of this size.
        lost = 2.0**-1074 if output == FLOAT64 else 0.0
        allowed, found = np.zeros(exact.shape), dict[Rung, FloatArray]()
        for rung in rungs(self.data):
            least = np.zeros(exact.shape)
            if rung != "exact":
                with np.errstate(all="ignore"):
                    slack = [self.slack(name, rung, each, output, below) for each in kinds]
                least = np.where(finite, np.fmin.reduce(slack), 0.0)
            if np.isfinite(least).all():
                allowed = np.maximum(allowed, half + least + lost)
                found[rung] = allowed
        return found
