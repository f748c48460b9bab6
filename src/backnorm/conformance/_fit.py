"""Compare results of a judged call with formulas, within the bounds of rounding errors.

A tensor such as dx is a sum of multiples of a few functions of an element: of dy, 1 and x - mean,
for example. :class:`Fit` has, for each channel, the projections of the tensor on an orthonormal
basis of these functions, and the norm of the rest. Projections can be compared even if the data do
not determine the coefficients of the functions, for example if x is constant in a channel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from backnorm.conformance._ulps import ulp_at
from backnorm.conformance.axes import Axes
from backnorm.conformance.judge import Quantity
from backnorm.conformance.ladder import Ladder
from backnorm.dtypes import FLOAT64, element_type, rounded
from backnorm.reference import Exact

Array = np.ndarray

TINY = float(np.finfo(float).tiny)
# If the last roundings of a tensor's elements are independent of each other, their sum in a
# projection is hardly ever more than this number times the root of the sum of the squares of the
# largest roundings.
_DEVIATIONS = 3.0
# The projections are computed in float64. Their errors, relative to the norm of the terms, are at
# most this number.
_OWN_ERROR = 2.0**-46
# A formula can predict larger numbers than the right formula. Their tolerance is larger in the same
# proportion, but at most this share of the numbers: it matters where the right formula's terms are
# 0 or cancel, for example if gamma is 0.
_LARGEST_TOLERANCE = 2.0**-8
# If the smallest singular value of the functions of a channel is less than this number times the
# largest, the data do not determine the coefficients of the functions.
_RANK = 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A result of a judged call. The arrays after `tensor` have the shape (C, M), or (C, 1).

    Attributes
    ----------
    name : str
    tensor : numpy.ndarray
        The result.
    axes : Axes
        Its rows.
    own, right, terms : numpy.ndarray
        The result, its exact value, and the sum of the magnitudes of the exact value's terms.
    allowed : numpy.ndarray
        The largest error that the ladder allows on its last rung.
    is_wrong : bool
        Whether the result is on no rung of the ladder.
    """

    name: str
    tensor: Array
    axes: Axes
    own: Array
    right: Array
    terms: Array
    allowed: Array
    is_wrong: bool

    @property
    def dtype(self) -> np.dtype:
        """The element type."""
        return element_type(self.tensor.dtype) or FLOAT64

    @property
    def rounding(self) -> Array:
        """The rounding error of a number as large as the terms, in the result's type."""
        rounding: Array = 0.5 * ulp_at(Exact.of(self.terms), self.dtype)
        return rounding

    @property
    def off(self) -> Array:
        """Where the errors are larger than rounding errors."""
        off: Array = np.abs(self.own - self.right) > self.allowed
        return off


def results_of(
    outputs: Mapping[Quantity, Array | None], ladder: Ladder, axes: Axes
) -> dict[str, Result]:
    """Return the results of a call by name, without those that are None.

    Parameters
    ----------
    outputs : mapping
    ladder : Ladder
    axes : Axes
        The rows of the tensors.
    """
    found: dict[str, Result] = {}
    for name, output in outputs.items():
        if output is None:
            continue
        is_wrong = not ladder.grade(name, output).passed
        *_, allowed = ladder.allowances(name, element_type(output.dtype) or FLOAT64).values()
        arrays = output, ladder.value(name).hi, ladder.terms(name), allowed
        own, right, terms, allowed = (
            axes.rows(each, FLOAT64)
            if each.shape == axes.shape
            else each.reshape(-1, 1).astype(FLOAT64)
            for each in arrays
        )
        found[name] = Result(name, output, axes, own, right, terms, allowed, is_wrong)
    return found


class Numbers(NamedTuple):
    """Numbers of a result that formulas predict, of shape (K, C), and how exact they are.

    `tolerance` has the largest errors that rounding causes in `found`, if the norm of the numbers
    in a channel is at most `size`, of shape (C,).
    """

    found: Array
    tolerance: Array
    size: Array

    def within(self, norm: Array) -> Array:
        """Return the tolerance if the norm of the numbers in a channel is `norm`, of shape (C,)."""
        return _scaled(self.tolerance, norm, self.size, _LARGEST_TOLERANCE)

    def distance(self, predicted: Array) -> float:
        """Return the largest difference from predicted numbers, as a multiple of the tolerance."""
        each = np.abs(self.found - predicted) / self.within(np.linalg.norm(predicted, axis=0))
        # 0 / 0 is no difference.
        each = np.where(self.found == predicted, 0.0, each)
        largest = float(each.max(initial=0.0))
        return math.inf if math.isnan(largest) else largest

    @classmethod
    def of(cls, result: Result) -> Numbers:
        """Return a result that has one number in each channel."""
        tolerance = result.allowed + result.rounding
        return cls(result.own.T, tolerance.T, result.terms[:, 0])


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The fit of a tensor by functions of an element, in each channel.

    Attributes
    ----------
    result : Result
    functions : numpy.ndarray
        Shape (K, C, M).
    numbers : Numbers
        The projections on an orthonormal basis of the functions, and the norm of the rest.
    coefficients, unsure : numpy.ndarray
        The coefficients of the functions, and the errors that rounding can be expected to cause in
        them, of shape (K, C). If the data do not determine the coefficients of a channel, or if
        rounding does not explain the rest, `unsure` is infinite.
    factors : numpy.ndarray
        The factors, of shape (C, K, K), that turn coefficients into projections.
    bases : numpy.ndarray
        The orthonormal bases, of shape (C, M, K).
    shared : numpy.ndarray
        The allowed errors of the elements, without the last rounding, of shape (C, M). Errors of a
        sum are the same in all elements of a channel.
    is_sum : numpy.ndarray
        Whether rounding explains the rest that the functions leave, of shape (C,).
    """

    result: Result
    functions: Array
    numbers: Numbers
    coefficients: Array
    unsure: Array
    factors: Array
    bases: Array
    shared: Array
    is_sum: Array

    @classmethod
    def of(cls, result: Result, functions: Sequence[Array]) -> Fit:
        """Fit a result by functions, each an array of shape (C, M)."""
        all_functions = np.stack(functions)
        size, channels, elements = all_functions.shape
        bases = np.zeros((channels, elements, size))
        found, tolerance = np.zeros((2, size + 1, channels))
        coefficients, unsure = np.zeros((2, size, channels))
        factors, scale = np.zeros((channels, size, size)), np.zeros(channels)
        ulp, rounding = ulp_at(Exact.of(result.right), result.dtype), result.rounding
        shared = np.maximum(result.allowed - 0.5 * ulp, 0.0)
        for k in range(channels):
            columns = all_functions[:, k].T
            # The sizes of the columns can be very different.
            norms = np.linalg.norm(columns, axis=0) + TINY
            basis, factor = np.linalg.qr(columns / norms)
            kept = basis.shape[1]
            bases[k, :, :kept] = basis
            projected = basis.T @ result.own[k]
            scale[k] = np.linalg.norm(result.terms[k])
            largest = result.allowed[k] + rounding[k]
            found[:kept, k] = projected
            found[-1, k] = np.linalg.norm(result.own[k] - basis @ projected)
            tolerance[:kept, k] = np.abs(basis).T @ largest
            tolerance[-1, k] = np.linalg.norm(largest)
            tolerance[:, k] += _OWN_ERROR * scale[k]
            expected = _DEVIATIONS * np.sqrt(np.square(basis).T @ np.square(rounding[k]))
            # Roundings depend on each other, for example, if dx is dy times a number near 1. In
            # this case, the roundings of the right values do so, too.
            lost = rounded(result.right[k], result.dtype).astype(FLOAT64) - result.right[k]
            expected += 2.0 * np.abs(basis.T @ lost) + np.abs(basis).T @ shared[k]
            # Roundings of larger elements than the right ones are larger.
            expected *= max(1.0, np.linalg.norm(result.own[k]) / (scale[k] + TINY))
            inverse = np.linalg.pinv(factor)
            coefficients[:, k] = inverse @ projected / norms
            unsure[:, k] = np.abs(inverse) @ (expected + _OWN_ERROR * scale[k]) / norms
            values = np.linalg.svd(factor, compute_uv=False)
            if kept < size or values[-1] < _RANK * values[0]:
                unsure[:, k] = np.inf
            factors[k, :kept] = factor * norms
        numbers = Numbers(found, tolerance, scale)
        is_sum = found[-1] <= numbers.within(np.linalg.norm(found, axis=0))[-1]
        unsure[:, ~is_sum] = np.inf
        return cls(
            result, all_functions, numbers, coefficients, unsure, factors, bases, shared, is_sum
        )

    def predicted(self, coefficients: Array) -> Array:
        """Return the numbers of a formula with these coefficients, of shape (K, C)."""
        projections = np.einsum("ckj,jc->kc", self.factors, coefficients)
        return np.concatenate([projections, np.zeros((1, len(self.factors)))])

    def projected(self, tensor: Array) -> Array:
        """Return the numbers of a tensor, of shape (K + 1, C), as in `numbers`."""
        projections = np.einsum("cmk,cm->kc", self.bases, tensor)
        rest = tensor - np.einsum("cmk,kc->cm", self.bases, projections)
        return np.concatenate([projections, np.linalg.norm(rest, axis=1)[None]])

    def agrees(self, coefficients: Array) -> bool:
        """Whether rounding explains every element, if the coefficients are these."""
        return self.is_near(np.einsum("kc,kcm->cm", coefficients, self.functions))

    def is_near(self, tensor: Array) -> bool:
        """Whether rounding explains every difference of the result from a formula's tensor."""
        norm, size = np.linalg.norm(tensor, axis=1), self.numbers.size
        largest = _LARGEST_TOLERANCE / np.sqrt(tensor.shape[1])
        shared = self.shared + _OWN_ERROR * self.result.terms
        shared = _scaled(shared, norm[:, None], size[:, None], largest)
        last = 0.5 * ulp_at(Exact.of(tensor), self.result.dtype)
        return bool((np.abs(self.result.own - tensor) <= shared + last).all())

    @property
    def residual(self) -> float:
        """The median over the channels of the norm of the rest, relative to that of the tensor."""
        norms = np.linalg.norm(self.numbers.found, axis=0) + TINY
        return float(np.median(self.numbers.found[-1] / norms))


def _scaled(tolerance: Array, norm: Array, size: Array, largest: float) -> Array:
    """Return the tolerance of numbers with a larger norm than `size`: see `_LARGEST_TOLERANCE`."""
    scaled: Array = np.fmin(tolerance * (norm / size), largest * norm)
    larger: Array = np.maximum(tolerance, scaled)
    return larger


def relative_error(own: Array, right: Array) -> float:
    """Return the norm of `own` - `right`, divided by the norm of `right`."""
    error, norm = float(np.linalg.norm(own - right)), float(np.linalg.norm(right))
    return error / norm if norm else math.inf * bool(error)
